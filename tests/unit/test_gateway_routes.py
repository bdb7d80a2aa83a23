"""Dynamic routes: validation, the meaning of conditions, and the path of a call through a route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from gateway_requests import call

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest, ModelNotFound
from emberline.gateway.core.errors import Forbidden, LimitExceeded, ProviderErrorReply, UpstreamTimeout
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.layers.dynamic_routes import DynamicRouteLayer
from emberline.gateway.layers.rate_limiting import limit_calls
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.routes.condition import compile_condition
from emberline.gateway.routes.facts import RequestAttributes
from emberline.gateway.routes.graph import ModelElement, RouteGraph
from emberline.gateway.routes.traversal import CompiledRoute, RouteTraversal
from emberline.wire.usage import Usage

# -- conditions --------------------------------------------------------------------------------------------------------

BODY = {
    "model": "dynamic/r",
    "n": 3,
    "messages": [{"role": "user", "content": "Hello there"}],
    "tags": ["a", 1],
    "on": True,
}
HEADERS = {"x-plan": "free", "authorization": "Bearer secret", "cf-aig-metadata": '{"team": "core", "age": 7}'}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"metadata.team": "core"}, True),
        ({"metadata.team": {"$eq": "other"}}, False),
        ({"metadata.none": {"$ne": "core"}}, True),
        ({"metadata.none": {"$eq": None}}, True),
        ({"metadata.age": {"$gt": 6, "$lt": 8}}, True),
        ({"metadata.age": {"$gte": 8}}, False),
        ({"metadata.age": {"$lte": 7}}, True),
        ({"metadata.age": {"$gt": "6"}}, False),
        ({"metadata.none": {"$lt": 1}}, False),
        ({"body.n": {"$in": [1, 3]}}, True),
        ({"body.n": {"$nin": [1, 3]}}, False),
        ({"body.on": {"$eq": 1}}, False),
        ({"body.on": True}, True),
        ({"body.messages.0.content": {"$regex": "^hello"}}, False),
        ({"body.messages.-1.content": {"$regex": "(?i)^hello"}}, True),
        ({"body.messages.5.content": {"$exists": True}}, False),
        ({"body.messages.0.content.x": {"$exists": False}}, True),
        ({"body.messages.0.content": {"$contains": "there"}}, True),
        ({"body.tags": {"$contains": 1}}, True),
        ({"body.tags": {"$contains": True}}, False),
        ({"headers.X-Plan": "free"}, True),
        ({"headers.authorization": {"$exists": True}}, False),  # credentials are hidden
        ({"user": "ada"}, True),
        ({"$and": [{"user": "ada"}, {"body.n": 3}]}, True),
        ({"$or": [{"user": "bob"}, {"body.n": 4}]}, False),
        ({"$not": {"user": "bob"}}, True),
        ({"user": "ada", "body.n": 4}, False),
    ],
)
def test_condition(condition: dict[str, Any], holds: bool) -> None:
    graph({"c": {"type": "conditional", "properties": {"condition": condition}}})
    identity = Identity("k", "k", "virtual", user="ada", metadata={"team": "core"})
    request = call(BODY, headers={**HEADERS, "cf-aig-metadata": '{"team": "forged", "age": 7}'}, identity=identity)
    assert compile_condition(condition)(RequestAttributes(request)) is holds


def graph(elements: Mapping[str, Any]) -> RouteGraph:
    """Return a graph with these elements; omitted outputs lead to model `m`, and from there to the end."""
    outputs = {
        "conditional": {"true": {"elementId": "m"}, "false": {"elementId": "m"}},
        "rate_limit": {"success": {"elementId": "m"}},
    }
    rows = [{"id": id, "outputs": outputs.get(e["type"], {}), **e} for id, e in elements.items()]
    rows += [
        {"id": "s", "type": "start", "outputs": {"next": {"elementId": next(iter(elements))}}},
        {
            "id": "m",
            "type": "model",
            "properties": {"provider": "p", "model": "m"},
            "outputs": {"success": {"elementId": "e"}},
        },
        {"id": "e", "type": "end"},
    ]
    return RouteGraph.parse({"elements": rows})


@pytest.mark.parametrize(
    "element",
    [
        {"type": "conditional", "properties": {"condition": {"body.x": {"$regex": "(a"}}}},
        {"type": "conditional", "properties": {"condition": {"body.x": {"$regex": 1}}}},
        {"type": "conditional", "properties": {"condition": {"body.x": {"$gt": [1]}}}},
        {"type": "conditional", "properties": {"condition": {"body.x": {"$exists": 1}}}},
        {"type": "conditional", "properties": {"condition": {"secrets.x": 1}}},
        {"type": "rate_limit", "properties": {"limitType": "count", "limit": 1, "interval": 60, "key": "body.user"}},
        {"type": "rate_limit", "properties": {"limitType": "count", "limit": 1.5, "interval": 60}},
        {"type": "percentage", "outputs": {"60%": {"elementId": "m"}, "50%": {"elementId": "m"}}},
        {"type": "percentage", "outputs": {"60%": {"elementId": "m"}}},
        {"type": "percentage", "outputs": {"60%": {"elementId": "x"}, "else": {"elementId": "m"}}},
        {"type": "percentage", "outputs": {"60%": {"elementId": "s"}, "else": {"elementId": "m"}}},
        {"type": "other"},
    ],
)
def test_invalid_graph_is_rejected(element: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        graph({"x": element})
    assert error.value.param == "elements"


# -- traversal ---------------------------------------------------------------------------------------------------------


def to(**outputs: str) -> dict[str, Any]:
    return {name: {"elementId": id} for name, id in outputs.items()}


def model(id: str, **outputs: str) -> dict[str, Any]:
    properties = {"provider": "openai", "model": id, "timeout": 1500, "retries": 3}
    return {"id": id, "type": "model", "properties": properties, "outputs": to(**outputs)}


END = {"id": "e", "type": "end"}
CHAIN = [
    {"id": "s", "type": "start", "outputs": to(next="c")},
    {
        "id": "c",
        "type": "conditional",
        "properties": {"condition": {"metadata.plan": "free"}},
        "outputs": to(true="small", false="rl"),
    },
    {
        "id": "rl",
        "type": "rate_limit",
        "properties": {"limitType": "count", "key": "metadata.user", "limit": 2, "interval": 60},
        "outputs": to(success="large", fallback="small"),
    },
    model("large", success="e", fallback="small"),
    model("small", success="e"),
    END,
]


def test_percentages_split_calls_and_follow_the_seed() -> None:
    rows = [
        {"id": "s", "type": "start", "outputs": to(next="p")},
        {
            "id": "p",
            "type": "percentage",
            "outputs": {"10%": {"elementId": "a"}, "50%": {"elementId": "b"}, "else": {"elementId": "c"}},
        },
        model("a", success="e"),
        model("b", success="e"),
        model("c", success="e"),
        END,
    ]
    plan = CompiledRoute.compile("r", RouteGraph.parse({"elements": rows}))

    def selected_model(seed: str) -> str:
        found = RouteTraversal.start(plan, RequestAttributes(call()), seed).next_action()
        assert isinstance(found, ModelElement)
        return found.id

    models = [selected_model(str(i)) for i in range(2000)]
    counts = {id: models.count(id) for id in "abc"}
    assert 140 < counts["a"] < 260 and 900 < counts["b"] < 1100 and 700 < counts["c"] < 900
    assert all(selected_model(str(i)) == models[i] for i in range(100))


class FakeModels:
    """A handler that returns a status or raises an error for each model, and records its calls."""

    def __init__(self, **script: Any) -> None:
        self.script = script
        self.calls: list[GatewayRequest] = []

    async def __call__(self, call: GatewayRequest) -> GatewayReply:
        self.calls.append(call)
        outcome = self.script.get(call.model, 200)
        if isinstance(outcome, Exception):
            raise outcome
        reply = GatewayReply(outcome, {}, b"{}", model=call.model, provider=call.provider, step_index=call.step_index)
        reply.usage, reply.micros = Usage(input=10, output=5), 100
        return reply

    @property
    def names(self) -> list[str]:
        return [call.model for call in self.calls]


class FakeEstimator:
    def max_cost(self, call: GatewayRequest) -> int | None:
        return {"large": 600, "small": 1}.get(call.model)


def run_route(
    models: FakeModels, elements: list[Any] = CHAIN, dynamic: DynamicRouteLayer | None = None, **more: Any
) -> GatewayReply:
    settings = {"routes": {"r": {"elements": elements}}}
    request = call({"model": "dynamic/r"}, provider="dynamic", model="r", settings=settings, **more)
    layer = dynamic or DynamicRouteLayer(LocalLimiter(), FakeEstimator(), ManualClock(), ManualClock(1e9))

    async def go() -> GatewayReply:
        reply = await layer.wrap(models)(request)
        await reply.close()
        return reply

    return asyncio.run(go())


def metadata_headers(**values: str) -> dict[str, str]:
    return {
        "cf-aig-metadata": json.dumps(values),
        "authorization": "Bearer of-another",
        "content-type": "application/json",
    }


def test_model_is_called_as_if_the_request_named_it() -> None:
    models = FakeModels()
    reply = run_route(models, headers=metadata_headers(plan="free"))
    assert (reply.model, reply.step_index, models.names) == ("small", 0, ["small"])
    request = models.calls[0]
    assert (request.provider, request.options.request_timeout, request.options.max_attempts) == ("openai", 1.5, 4)
    assert "authorization" not in request.headers and request.headers["content-type"] == "application/json"


@pytest.mark.parametrize("error", [UpstreamTimeout("late"), Forbidden("no"), LimitExceeded("much", rule="r")])
def test_failed_model_falls_back_to_the_next(error: Exception) -> None:
    models = FakeModels(large=error)
    reply = run_route(models)
    assert (reply.model, reply.step_index, models.names) == ("small", 1, ["large", "small"])
    assert [request.is_last_step for request in models.calls] == [False, True]
    with pytest.raises(type(error)):
        run_route(FakeModels(large=error, small=error))


def test_request_error_has_no_fallback() -> None:
    wrong = ProviderErrorReply("bad", reason="request", status=400, headers={}, body=b"")
    models = FakeModels(large=wrong)
    with pytest.raises(ProviderErrorReply):
        run_route(models)
    assert models.names == ["large"]
    blocked = FakeModels(large=400)
    assert run_route(blocked).status == 400 and blocked.names == ["large"]


def test_route_quota_counts_each_value_and_falls_back() -> None:
    dynamic = DynamicRouteLayer(LocalLimiter(), FakeEstimator(), ManualClock(), ManualClock(1e9))
    models = [run_route(FakeModels(), dynamic=dynamic, headers=metadata_headers(user=user)).model for user in "aaabab"]
    assert models == ["large", "large", "small", "large", "small", "large"]


def test_route_quota_without_fallback_ends_the_route() -> None:
    quota = {"limitType": "cost", "limit": 0.001, "interval": 60}
    rows = [{"id": "s", "type": "start", "outputs": to(next="q")},
            {"id": "q", "type": "rate_limit", "properties": quota, "outputs": to(success="large")},
            model("large", success="e"), END]  # fmt: skip
    dynamic = DynamicRouteLayer(LocalLimiter(), FakeEstimator(), ManualClock(), ManualClock(1e9))
    for _ in range(10):  # each reserves 600 of 1000 micro-dollars and costs 100
        run_route(FakeModels(), rows, dynamic)
    with pytest.raises(LimitExceeded) as error:
        run_route(FakeModels(), rows, dynamic)
    assert error.value.code == "budget_exceeded"


def test_last_of_two_answers_is_sent_and_both_are_billed() -> None:
    rows = [
        {"id": "s", "type": "start", "outputs": to(next="large")},
        model("large", success="small"),
        model("small", success="e"),
        END,
    ]
    reply = run_route(FakeModels(), rows)
    assert (reply.model, reply.micros, reply.usage) == ("small", 200, Usage(input=20, output=10))


def test_route_respects_the_allowed_models_of_a_key() -> None:
    small = Identity("k", "k", "virtual", allowed_models=("small",))
    models = FakeModels()
    assert run_route(models, identity=small).model == "small" and models.names == ["small"]
    route = Identity("k", "k", "virtual", allowed_models=("dynamic/r",))
    assert run_route(FakeModels(), identity=route).model == "large"
    with pytest.raises(Forbidden):
        run_route(FakeModels(), identity=Identity("k", "k", "virtual", allowed_models=("other",)))


def test_call_with_fallback_counts_as_one_request() -> None:
    clock, wall, limiter = ManualClock(), ManualClock(1e9), LocalLimiter()
    dynamic = DynamicRouteLayer(limiter, FakeEstimator(), clock, wall)
    rule = {"name": "two", "limit": 2, "per": "minute"}

    class EmptyCatalogue:
        def model(self, provider: str, name: str) -> None: ...
        def price(self, settings: GatewaySettings, provider: str, model: str) -> None: ...
        def max_output(self, provider: str, model: str) -> None: ...

    async def ask() -> GatewayReply:
        routes = {"r": {"elements": CHAIN}}
        request = call(
            provider="dynamic",
            model="r",
            settings={"routes": routes, "limits": [rule]},
            headers=metadata_headers(user="x"),
        )
        handler = dynamic.wrap(
            limit_calls(limiter, EmptyCatalogue(), EmptyCatalogue(), clock, wall)(
                FakeModels(large=UpstreamTimeout("late"))
            )
        )
        reply = await handler(request)
        await reply.close()
        return reply

    assert [asyncio.run(ask()).model for _ in range(2)] == ["small", "small"]
    with pytest.raises(LimitExceeded):
        asyncio.run(ask())


def test_unknown_route_is_not_found() -> None:
    layer = DynamicRouteLayer(LocalLimiter(), FakeEstimator(), ManualClock(), ManualClock()).wrap(FakeModels())
    with pytest.raises(ModelNotFound):
        asyncio.run(layer(call(provider="dynamic", model="x")))
