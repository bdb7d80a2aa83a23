"""Dynamic routes, pools and hedging over HTTP: deployed through the management API, used by real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import LocalGateway
from routers import until

ADMIN = {"authorization": "Bearer a-key-of-the-tests"}
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
TEXT = "".join(f"word{i} " for i in range(8))
BOTH = ["openai-chat", "anthropic"]


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
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
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    home = tmp_path_factory.mktemp("routed")
    breaker = {"failures": 1000}
    with LocalGateway(
        home, ("first", "second"), provider_settings, pools=POOLS, prices=PRICES, breaker=breaker
    ) as made:
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


def manage(gateway: LocalGateway, method: str, path: str, body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    status, _, reply_data = gateway.post(f"/admin/accounts/default/routes/{path}", data, ADMIN, method)
    assert status in (200, 201), reply_data
    return json.loads(reply_data)


def deploy(gateway: LocalGateway, name: str, elements: Any) -> None:
    version = manage(gateway, "POST", f"{name}/versions", {"elements": elements})["number"]
    manage(gateway, "POST", f"{name}/deploy", {"version": version})
    until(lambda: ask(gateway, f"dynamic/{name}", stream=False)[0] != 404, 5)
    gateway.reset()


def ask(gateway: LocalGateway, model: str, metadata: Any = None, **more: Any) -> tuple[int, dict[str, str], bytes]:
    headers = {"cf-aig-metadata": json.dumps(metadata)} if metadata else {}
    return gateway.post(CHAT, {"model": model, "messages": HELLO, **more}, headers)


def serving_step(headers: dict[str, str]) -> tuple[str, str, str]:
    return headers["cf-aig-provider"], headers["cf-aig-model"], headers["cf-aig-step"]


def test_route_with_condition_quota_and_fallback(gateway: LocalGateway) -> None:
    deploy(gateway, "support", support())
    for path in (CHAT, "/v1/default/default/compat/chat/completions"):
        status, headers, body = gateway.post(path, {"model": "dynamic/support", "messages": HELLO})
        assert status == 200 and serving_step(headers) == ("second", "small", "0")
        assert json.loads(body)["choices"][0]["message"]["content"] == TEXT
    assert gateway.fakes["second"].requests[-1].json["model"] == "small"
    step = {
        "provider": "compat",
        "endpoint": "chat/completions",
        "query": {"model": "dynamic/support", "messages": HELLO},
    }
    status, headers, body = gateway.post("/v1/default/default", [step])
    assert status == 200 and serving_step(headers) == ("second", "small", "0"), body
    providers = [serving_step(ask(gateway, "dynamic/support", {"plan": "paid", "user": user})[1])[0] for user in "aaab"]
    assert providers == ["first", "first", "second", "first"]
    for fault, user in (("500", "c"), ("silent", "d"), ("cut", "e"), ("error-event", "f"), ("refused", "g")):
        gateway.fakes["first"].fault, gateway.fakes["first"].fault_after = fault, 0
        for stream in (False, True):
            status, headers, body = ask(gateway, "dynamic/support", {"plan": "paid", "user": user}, stream=stream)
            assert status == 200 and serving_step(headers) == ("second", "small", "1"), (fault, stream)
            record = gateway.record(headers["cf-aig-log-id"])
            assert (record.step, record.provider, record.success, record.attempts) == (1, "second", True, 2)


def test_route_without_an_answer_returns_the_error(gateway: LocalGateway) -> None:
    deploy(gateway, "failing", support())
    gateway.fakes["first"].fault = gateway.fakes["second"].fault = "500"
    status, headers, body = ask(gateway, "dynamic/failing", {"plan": "paid", "user": "x"})
    assert status == 500 and serving_step(headers) == ("second", "small", "1")
    status, _, body = ask(gateway, "dynamic/missing")
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"


def test_clients_of_both_dialects_stream_through_a_route(gateway: LocalGateway) -> None:
    deploy(gateway, "both", support())
    client = openai.OpenAI(base_url=f"{gateway.url}/v1/default/default/compat", api_key="not-for-them", max_retries=0)
    chunks = client.chat.completions.create(model="dynamic/both", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert "authorization" not in gateway.fakes["second"].requests[-1].headers, (
        "the key is not passed to another provider"
    )
    anthropic_client = anthropic.Anthropic(base_url=gateway.url, api_key="k", max_retries=0)
    with anthropic_client.messages.stream(model="dynamic/both", messages=HELLO, max_tokens=8) as stream:
        assert stream.get_final_text() == TEXT


def test_deploy_and_rollback_take_effect(gateway: LocalGateway) -> None:
    deploy(gateway, "versions", support("one"))
    manage(gateway, "POST", "versions/versions", {"elements": support("two")})

    def deployed_model() -> str:
        return serving_step(
            ask(gateway, "dynamic/versions", {"plan": "paid", "user": str(gateway.fakes["first"].count)})[1]
        )[1]

    assert deployed_model() == "one"
    manage(gateway, "POST", "versions/deploy", {"version": 2})
    until(lambda: deployed_model() == "two", 5)
    manage(gateway, "POST", "versions/rollback")
    until(lambda: deployed_model() == "one", 5)


def test_session_keeps_its_percentage_branch(gateway: LocalGateway) -> None:
    outputs = {"50%": {"elementId": "m1"}, "else": {"elementId": "m2"}}
    rows = [
        {"id": "s", "type": "start", "outputs": to(next="p")},
        {"id": "p", "type": "percentage", "outputs": outputs},
        model("m1", "first", "x", success="e"),
        model("m2", "pool", "balanced", success="e"),  # a pool in place of a provider
        {"id": "e", "type": "end"},
    ]
    deploy(gateway, "parted", rows)

    def selected_provider(session: str) -> str:
        body = {"model": "dynamic/parted", "messages": HELLO}
        return gateway.post(CHAT, body, {"cf-aig-session-id": session})[1]["cf-aig-provider"]

    selected = {str(i): selected_provider(str(i)) for i in range(12)}
    assert set(selected.values()) == {"first", "second"}
    assert all(selected_provider(session) == provider for session, provider in selected.items())


# -- pools -------------------------------------------------------------------------------------------------------------


def test_pool_balances_and_skips_a_failed_member(gateway: LocalGateway) -> None:
    body = {"model": "balanced", "messages": HELLO}
    for i in range(40):  # the session draws the member, so that every run draws alike
        assert gateway.post(CHAT, body, {"cf-aig-session-id": f"session-{i}"})[0] == 200
    counts = [gateway.fakes[name].count for name in ("first", "second")]
    assert sum(counts) == 40 and counts[0] > counts[1] > 0
    gateway.reset()
    gateway.fakes["first"].fault = "500"
    replies = [ask(gateway, "balanced") for _ in range(12)]
    assert {status for status, _, _ in replies} == {200}
    assert gateway.fakes["first"].count <= 6, "a failed member is skipped for a back-off"
    gateway.reset()


def test_hedge_calls_the_second_member_and_cancels_the_first(gateway: LocalGateway) -> None:
    until(lambda: serving_step(ask(gateway, "hedged")[1])[0] == "first", 10)  # its back-off has ended
    for stream in (False, True):
        for _ in range(20):  # enough samples for the latency quantile
            assert ask(gateway, "hedged", stream=stream)[0] == 200
    gateway.reset()
    gateway.fakes["first"].fault = "silent"
    for stream in (False, True):
        status, headers, _ = ask(gateway, "hedged", stream=stream)
        assert status == 200 and serving_step(headers) == ("second", "y", "1"), stream
        record = gateway.record(headers["cf-aig-log-id"])
        assert record.success and record.estimated and record.usage.input > 11
        assert record.micros is not None and record.micros > (11 + 8) * 9, "the cancelled call is billed, too"
        until(lambda: gateway.fakes["first"].running == 0, 5)
    assert gateway.fakes["first"].gone >= 2
