"""Dynamic routes, pools and hedging over HTTP: deployed by the management API, asked by real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from gateways import Gateways
from routers import until

ADMIN = {"authorization": "Bearer a-key-of-the-tests"}
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
TEXT = "".join(f"word{i} " for i in range(8))
BOTH = ["openai-chat", "anthropic"]


def places(urls: dict[str, str]) -> dict[str, Any]:
    return {name: {"base_url": url, "speaks": BOTH} for name, url in urls.items()}


POOLS = {
    "balanced": {"members": [{"provider": "first", "model": "x", "weight": 3}, {"provider": "second", "model": "y"}]},
    "hedged": {
        "choose": "cheapest",
        "hedge": True,
        "members": [{"provider": "first", "model": "x"}, {"provider": "second", "model": "y"}],
    },
}
PRICES = {"first/x": {"input": 1_000_000, "output": 1_000_000}, "second/y": {"input": 9_000_000, "output": 9_000_000}}


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    home = tmp_path_factory.mktemp("routed")
    breaker = {"failures": 1000}
    with Gateways(home, ("first", "second"), places, pools=POOLS, prices=PRICES, breaker=breaker) as made:
        yield made


def to(**outputs: str) -> dict[str, Any]:
    return {name: {"elementId": id} for name, id in outputs.items()}


def model(id: str, provider: str, name: str, **outputs: str) -> dict[str, Any]:
    properties = {"provider": provider, "model": name, "timeout": 2500, "retries": 0}
    return {"id": id, "type": "model", "properties": properties, "outputs": to(**outputs)}


def support(paid: str = "large") -> list[dict[str, Any]]:
    condition = {"metadata.plan": {"$eq": "paid"}}
    quota = {"limitType": "count", "key": "metadata.user", "limit": 2, "interval": 3600}
    return [
        {"id": "s", "type": "start", "outputs": to(next="c")},
        {"id": "c", "type": "conditional", "properties": {"condition": condition}, "outputs": to(true="q", false="m2")},
        {"id": "q", "type": "rate_limit", "properties": quota, "outputs": to(success="m1", fallback="m2")},
        model("m1", "first", paid, success="e", fallback="m2"),
        model("m2", "second", "small", success="e"),
        {"id": "e", "type": "end"},
    ]


def manage(gateway: Gateways, method: str, path: str, body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    status, _, told = gateway.post(f"/admin/accounts/default/routes/{path}", data, ADMIN, method)
    assert status in (200, 201), told
    return json.loads(told)


def deployed(gateway: Gateways, name: str, elements: Any) -> None:
    version = manage(gateway, "POST", f"{name}/versions", {"elements": elements})["number"]
    manage(gateway, "POST", f"{name}/deploy", {"version": version})
    until(lambda: ask(gateway, f"dynamic/{name}", stream=False)[0] != 404, 5)
    gateway.reset()


def ask(gateway: Gateways, model: str, meta: Any = None, **more: Any) -> tuple[int, dict[str, str], bytes]:
    headers = {"cf-aig-metadata": json.dumps(meta)} if meta else {}
    return gateway.post(CHAT, {"model": model, "messages": HELLO, **more}, headers)


def served(headers: dict[str, str]) -> tuple[str, str, str]:
    return headers["cf-aig-provider"], headers["cf-aig-model"], headers["cf-aig-step"]


def test_a_route_by_condition_limit_and_fallback(gateway: Gateways) -> None:
    deployed(gateway, "support", support())
    for path in (CHAT, "/v1/default/default/compat/chat/completions"):
        status, headers, body = gateway.post(path, {"model": "dynamic/support", "messages": HELLO})
        assert status == 200 and served(headers) == ("second", "small", "0")
        assert json.loads(body)["choices"][0]["message"]["content"] == TEXT
    assert gateway.fakes["second"].requests[-1].json["model"] == "small"
    step = {
        "provider": "compat",
        "endpoint": "chat/completions",
        "query": {"model": "dynamic/support", "messages": HELLO},
    }
    status, headers, body = gateway.post("/v1/default/default", [step])
    assert status == 200 and served(headers) == ("second", "small", "0"), body
    ways = [served(ask(gateway, "dynamic/support", {"plan": "paid", "user": user})[1])[0] for user in "aaab"]
    assert ways == ["first", "first", "second", "first"]
    for fault, user in (("500", "c"), ("silent", "d"), ("cut", "e"), ("error-event", "f"), ("refused", "g")):
        gateway.fakes["first"].fault, gateway.fakes["first"].fault_after = fault, 0
        for stream in (False, True):
            status, headers, body = ask(gateway, "dynamic/support", {"plan": "paid", "user": user}, stream=stream)
            assert status == 200 and served(headers) == ("second", "small", "1"), (fault, stream)
            record = gateway.record(headers["cf-aig-log-id"])
            assert (record.step, record.provider, record.success, record.attempts) == (1, "second", True, 2)


def test_a_route_that_nobody_answers(gateway: Gateways) -> None:
    deployed(gateway, "nobody", support())
    gateway.fakes["first"].fault = gateway.fakes["second"].fault = "500"
    status, headers, body = ask(gateway, "dynamic/nobody", {"plan": "paid", "user": "x"})
    assert status == 500 and served(headers) == ("second", "small", "1")
    status, _, body = ask(gateway, "dynamic/missing")
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"


def test_clients_of_both_dialects_stream_through_a_route(gateway: Gateways) -> None:
    deployed(gateway, "both", support())
    client = openai.OpenAI(base_url=f"{gateway.url}/v1/default/default/compat", api_key="not-for-them", max_retries=0)
    chunks = client.chat.completions.create(model="dynamic/both", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert "authorization" not in gateway.fakes["second"].requests[-1].headers, "a key of one is not shown to another"
    theirs = anthropic.Anthropic(base_url=gateway.url, api_key="k", max_retries=0)
    with theirs.messages.stream(model="dynamic/both", messages=HELLO, max_tokens=8) as stream:
        assert stream.get_final_text() == TEXT


def test_deploy_and_rollback_are_in_force(gateway: Gateways) -> None:
    deployed(gateway, "versions", support("one"))
    manage(gateway, "POST", "versions/versions", {"elements": support("two")})

    def now() -> str:
        return served(ask(gateway, "dynamic/versions", {"plan": "paid", "user": str(gateway.fakes["first"].count)})[1])[
            1
        ]

    assert now() == "one"
    manage(gateway, "POST", "versions/deploy", {"version": 2})
    until(lambda: now() == "two", 5)
    manage(gateway, "POST", "versions/rollback")
    until(lambda: now() == "one", 5)


def test_a_session_stays_on_its_side(gateway: Gateways) -> None:
    parted = {"50%": {"elementId": "m1"}, "else": {"elementId": "m2"}}
    rows = [
        {"id": "s", "type": "start", "outputs": to(next="p")},
        {"id": "p", "type": "percentage", "outputs": parted},
        model("m1", "first", "x", success="e"),
        model("m2", "pool", "balanced", success="e"),  # a pool may stand where a provider does
        {"id": "e", "type": "end"},
    ]
    deployed(gateway, "parted", rows)

    def side(session: str) -> str:
        body = {"model": "dynamic/parted", "messages": HELLO}
        return gateway.post(CHAT, body, {"cf-aig-session-id": session})[1]["cf-aig-provider"]

    sides = {str(i): side(str(i)) for i in range(12)}
    assert set(sides.values()) == {"first", "second"}
    assert all(side(session) == provider for session, provider in sides.items())


# -- pools -------------------------------------------------------------------------------------------------------------


def test_a_pool_spreads_and_goes_on_without_the_one_that_fails(gateway: Gateways) -> None:
    for _ in range(40):
        assert ask(gateway, "balanced")[0] == 200
    counts = [gateway.fakes[name].count for name in ("first", "second")]
    assert sum(counts) == 40 and counts[0] > counts[1] > 0
    gateway.reset()
    gateway.fakes["first"].fault = "500"
    replies = [ask(gateway, "balanced") for _ in range(12)]
    assert {status for status, _, _ in replies} == {200}
    assert gateway.fakes["first"].count <= 6, "who fails is left alone for a while"
    gateway.reset()


def test_a_hedge_asks_the_second_and_hangs_up_on_the_first(gateway: Gateways) -> None:
    until(lambda: served(ask(gateway, "hedged")[1])[0] == "first", 10)  # it has rested
    for stream in (False, True):
        for _ in range(20):  # after so many it is known how long it takes
            assert ask(gateway, "hedged", stream=stream)[0] == 200
    gateway.reset()
    gateway.fakes["first"].fault = "silent"
    for stream in (False, True):
        status, headers, _ = ask(gateway, "hedged", stream=stream)
        assert status == 200 and served(headers) == ("second", "y", "1"), stream
        record = gateway.record(headers["cf-aig-log-id"])
        assert record.success and record.estimated and record.usage.input > 11
        assert record.micros is not None and record.micros > (11 + 8) * 9, "the other one has to be paid, too"
        until(lambda: gateway.fakes["first"].running == 0, 5)
    assert gateway.fakes["first"].gone >= 2
