"""The layer of limits: matching rules, reservations, settlements and headers of replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_requests import call

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest
from emberline.gateway.core.cost import Price
from emberline.gateway.core.errors import Forbidden, LimitExceeded
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.options import RequestOptions
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, RequestStep
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.costs.billing import set_cost
from emberline.gateway.costs.catalogue import Catalogue, CatalogueModel
from emberline.gateway.layers.permissions import check_gateway
from emberline.gateway.layers.rate_limiting import limit_calls
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.settings_checks import check_settings
from emberline.wire.usage import Usage

CATALOGUE = Catalogue(
    [
        CatalogueModel("openai", "gpt-4o-mini", "chat", Price(150_000, 600_000), 128_000, 1000, (), "test", None)  # type: ignore[arg-type]
    ]
)


class Prices:
    def price(self, settings: GatewaySettings, provider: str, model: str) -> Price | None:
        return CATALOGUE.price(provider, model)


class LimitedGateway:
    """The layer over an inner handler with a given reply."""

    def __init__(self) -> None:
        self.limiter, self.wall = LocalLimiter(), ManualClock(1000.0)
        self.usage: Usage | None = Usage(input=10, output=20)
        self.micros: int | None = 7
        self.cached = False
        self.failure: BaseException | None = None
        self.handler: Handler = limit_calls(self.limiter, CATALOGUE, Prices(), ManualClock(), self.wall)(self._inner)

    async def _inner(self, call: GatewayRequest) -> GatewayReply:
        if self.failure is not None:
            raise self.failure
        return GatewayReply(200, {}, b"{}", usage=self.usage, micros=self.micros, cached=self.cached)

    def ask(self, *, close: bool = True, **about: Any) -> GatewayRequest:
        async def go() -> GatewayRequest:
            made = call(**about)
            reply = await self.handler(made)
            if close:
                await reply.close()
            return made

        return asyncio.run(go())


def remaining(made: GatewayRequest, amount: str) -> int:
    return int(made.reply_headers[f"x-ratelimit-remaining-{amount}"])


def test_requests_are_counted_and_reported_in_headers() -> None:
    bench, settings = LimitedGateway(), {"limits": [{"name": "all", "limit": 2, "per": 60}]}
    assert [remaining(bench.ask(settings=settings), "requests") for _ in range(2)] == [1, 0]
    with pytest.raises(LimitExceeded) as refused:
        bench.ask(settings=settings)
    assert refused.value.retry_after == 20  # the window of 60 s that 1000 is in ends at 1020
    bench.wall.advance(20)
    assert remaining(bench.ask(settings=settings), "requests") == 1


def test_refusal_has_the_same_headers() -> None:
    async def go() -> GatewayRequest:
        bench, made = LimitedGateway(), call(settings={"limits": [{"name": "none", "limit": 0, "amount": "tokens"}]})
        with pytest.raises(LimitExceeded):
            await bench.handler(made)
        return made

    assert asyncio.run(go()).reply_headers == {
        "x-ratelimit-limit-tokens": "0",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "20s",
    }


def test_maximum_is_reserved_and_actual_use_settled() -> None:
    bench = LimitedGateway()
    settings = {"limits": [{"name": "t", "limit": 10_000, "amount": "tokens", "per": "day"}]}
    body = b"x" * 400
    assert remaining(bench.ask(body=body, settings=settings, max_output=500), "tokens") == 10_000 - 100 - 500
    assert remaining(bench.ask(body=body, settings=settings), "tokens") == 10_000 - 30 - 100 - 1000  # the catalogue's
    made = bench.ask(body=body, settings=settings, max_output=10**9, dialect="openai-embeddings")
    assert remaining(made, "tokens") == 10_000 - 60 - 100
    unknown = bench.ask(body=body, settings=settings, model="unheard-of")
    assert remaining(unknown, "tokens") == 10_000 - 90 - 100 - 4096


def test_budgets_are_in_micros() -> None:
    bench, settings = LimitedGateway(), {"budgets": [{"name": "b", "limit": 1_000, "per": "month"}]}
    body = b"x" * 4000
    reserved = (1000 * 150_000 + 100 * 600_000) // 1_000_000
    assert remaining(bench.ask(body=body, settings=settings, max_output=100), "micros") == 1_000 - reserved
    assert remaining(bench.ask(body=body, settings=settings, max_output=100), "micros") == 1_000 - 7 - reserved
    own = Identity("k", "k", "token")
    made = bench.ask(settings=settings, identity=own, headers={"cf-aig-custom-cost": '{"total_cost": 0.000100}'})
    assert remaining(made, "micros") == 1_000 - 14 - 100


def test_every_choice_is_reserved() -> None:
    bench, settings = LimitedGateway(), {"limits": [{"name": "t", "limit": 10_000, "amount": "tokens"}]}
    first = bench.ask(body=b"x" * 400, settings=settings, max_output=500, answers=7, close=False)
    assert remaining(first, "tokens") == 9_900 - 7 * 500
    for answers in (13, 10**30):
        with pytest.raises(LimitExceeded):
            bench.ask(settings=settings, max_output=500, answers=answers)


STATED_COSTS = ['{"total_cost": 0}', '{"total_cost": 0.0009}', '{"per_token_in": 0, "per_token_out": 0}']


@pytest.mark.parametrize("stated", STATED_COSTS)
@pytest.mark.parametrize("kind", ["virtual", "anonymous", "token"])
def test_a_caller_cannot_charge_a_shared_budget_with_a_stated_cost(kind: Any, stated: str) -> None:
    bench, settings = LimitedGateway(), {"budgets": [{"name": "b", "limit": 1_000}]}
    bench.handler = check_gateway(bench.handler)
    caller, headers = Identity("k", "k", kind), {"cf-aig-custom-cost": stated}
    for _ in range(2):
        with pytest.raises(Forbidden, match="may not state the cost"):
            bench.ask(settings=settings, identity=caller, headers=headers)
    steps = (RequestStep("openai", "gpt-4o-mini", options=RequestOptions.from_headers(headers)),)
    with pytest.raises(Forbidden, match="may not state the cost"):
        bench.ask(settings=settings, identity=caller, steps=steps)
    assert remaining(bench.ask(settings=settings, max_output=1), "micros") >= 990


@pytest.mark.parametrize(("stated", "reserved"), [*zip(STATED_COSTS, [0, 900, 0], strict=True)])
def test_the_stated_cost_of_a_permitted_key_replaces_the_known_one(stated: str, reserved: int) -> None:
    bench, settings = LimitedGateway(), {"budgets": [{"name": "b", "limit": 1_000}]}
    bench.handler = check_gateway(bench.handler)
    caller = Identity("k", "k", "virtual", may_state_cost=True)
    made = bench.ask(settings=settings, identity=caller, headers={"cf-aig-custom-cost": stated}, max_output=1000)
    assert remaining(made, "micros") == 1_000 - reserved
    reply = GatewayReply(200, {}, b"", usage=Usage(input=0, output=1000), provider="openai")
    set_cost(made, reply, Prices())  # type: ignore[arg-type]
    assert reply.micros == reserved


def test_unknown_price_is_refused_by_budget() -> None:
    bench = LimitedGateway()
    with pytest.raises(Forbidden, match="is unknown"):
        bench.ask(settings={"budgets": [{"name": "b", "limit": 10}]}, model="unheard-of")
    bench.micros = None
    made = bench.ask(settings={"budgets": [{"name": "b", "limit": 10, "unpriced": "pass"}]}, model="unheard-of")
    assert remaining(made, "micros") == 10


@pytest.mark.parametrize("how", ["cached", "failed", "left"])
def test_unused_tokens_are_released_but_request_counts(how: str) -> None:
    bench = LimitedGateway()
    settings = {"limits": [{"name": "t", "limit": 9000, "amount": "tokens"}, {"name": "r", "limit": 9}]}
    if how == "cached":
        bench.cached, bench.micros = True, 0
        bench.ask(settings=settings)
    else:
        bench.failure = asyncio.CancelledError() if how == "left" else RuntimeError()
        with pytest.raises(type(bench.failure)):
            bench.ask(settings=settings)
    bench.failure, bench.cached = None, False
    after = bench.ask(body=b"{}", settings=settings, max_output=99)
    assert (remaining(after, "tokens"), remaining(after, "requests")) == (9000 - 100, 7)


def test_stream_keeps_its_reservation_until_closed() -> None:
    bench, settings = LimitedGateway(), {"limits": [{"name": "t", "limit": 200, "amount": "tokens", "per": "day"}]}
    bench.ask(settings=settings, max_output=150, close=False)
    with pytest.raises(LimitExceeded):
        bench.ask(settings=settings, max_output=150)
    bench.wall.advance(606)  # the request's deadline and a margin
    assert remaining(bench.ask(settings=settings, max_output=150), "tokens") == 49


def test_limits_split_by_dimension() -> None:
    bench = LimitedGateway()
    ada = Identity("k1", "ada's", "virtual", user="ada", metadata={"team": "blue"})
    bob = Identity("k2", "bob's", "virtual", user="bob", metadata={"team": "blue"}, limits=("special",))
    settings = {
        "limits": [
            {"name": "user", "limit": 2, "split": ["user"]},
            {"name": "team", "limit": 3, "split": ["metadata.team"]},
            {"name": "special", "limit": 1, "named": True},
            {"name": "other", "limit": 0, "only": {"model": ["forbidden"]}},
        ]
    }
    spoof = {"cf-aig-metadata": '{"team": "red"}'}
    bench.ask(identity=ada, settings=settings, headers=spoof)
    bench.ask(identity=ada, settings=settings)
    for caller, model, rule in [
        (ada, "gpt-4o-mini", "user"),
        (bob, "forbidden", "other"),
    ]:
        with pytest.raises(LimitExceeded) as refused:
            bench.ask(identity=caller, settings=settings, model=model)
        assert refused.value.rule == rule
    bench.ask(identity=bob, settings=settings)
    with pytest.raises(LimitExceeded) as refused:
        bench.ask(identity=bob, settings=settings, headers=spoof)
    assert refused.value.rule in ("team", "special")


def test_changed_limits_are_used_and_invalid_ones_refused() -> None:
    bench = LimitedGateway()
    bench.ask(settings={"limits": [{"name": "r", "limit": 1}]})
    assert remaining(bench.ask(settings={"limits": [{"name": "r", "limit": 5}], "version": 1}), "requests") == 3
    with pytest.raises(InvalidRequest):
        bench.ask(settings={"limits": [{"name": "r"}]})
    with pytest.raises(InvalidRequest, match="same name"):
        bench.ask(settings={"limits": [{"name": "r", "limit": 1}], "budgets": [{"name": "r", "limit": 1}]})


def test_no_rules_add_no_headers() -> None:
    assert LimitedGateway().ask().reply_headers == {}


def test_evadable_limit_logs_warning(caplog: pytest.LogCaptureFixture) -> None:
    team = {"name": "team", "limit": 5, "split": ["metadata.team", "user"]}
    check_settings(GatewaySettings.parse({"budgets": [team]}))
    assert "limit=team metadata=team" in caplog.text
    caplog.clear()
    check_settings(GatewaySettings.parse({"budgets": [team], "metadata": {"team": "red"}}))
    check_settings(GatewaySettings.parse({"budgets": [{**team, "split": ["user", "key"]}]}))
    assert not caplog.text
