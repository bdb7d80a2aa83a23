"""Circuit breakers and pools: one caller's timeout, key or model does not block others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gateway_requests import call

from emberline.core.clock import ManualClock
from emberline.gateway.core.errors import (
    CircuitBreakerOpen,
    ProviderErrorReply,
    UpstreamBroken,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from emberline.gateway.core.request import GatewayReply, GatewayRequest, ProviderAttempt
from emberline.gateway.layers.load_balancing import balance_pools
from emberline.gateway.providers import breakers as module
from emberline.gateway.providers.breakers import ProviderBreakers
from emberline.gateway.providers.openai import OpenAI

SHORT = {"cf-aig-request-timeout": "1"}
BAD_KEY = ProviderErrorReply("no", reason="access", status=401)


def _attempt(outcome: Exception | None) -> Callable[[Any], Any]:
    async def attempt(_: object) -> str:
        if outcome is not None:
            raise outcome
        return "answered"

    return attempt


class GuardedProvider:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.breakers = ProviderBreakers(self.clock)

    def ask(self, outcome: Exception | None, one: GatewayRequest, key: str | None = "gateway-key") -> str:
        try:
            return asyncio.run(self.breakers.run_with_breaker(one, OpenAI(), key, _attempt(outcome)))
        except UpstreamFailed as e:
            return type(e).__name__

    def fail(self, outcome: Exception, one: GatewayRequest, key: str | None = "gateway-key", times: int = 5) -> None:
        for _ in range(times):
            self.ask(outcome, one, key)


@pytest.mark.parametrize(
    "outcome",
    [
        UpstreamTimeout("slow"),
        UpstreamBroken("cut"),
        UpstreamUnreachable("gone"),
        ProviderErrorReply("oops", status=500),
    ],
)
def test_provider_failures_open_breaker(outcome: Exception) -> None:
    provider = GuardedProvider()
    provider.fail(outcome, call())
    assert provider.ask(None, call()) == "CircuitBreakerOpen"
    assert dict(provider.breakers) == {OpenAI().origin: 1}
    provider.clock.advance(1.1)
    assert provider.ask(None, call()) == "answered" and dict(provider.breakers) == {}


@pytest.mark.parametrize("outcome", [UpstreamTimeout("slow"), UpstreamUnreachable("no connection within 0.001 s")])
@pytest.mark.parametrize("stream", [False, True])
def test_caller_timeout_is_not_counted(outcome: Exception, stream: bool) -> None:
    provider = GuardedProvider()
    provider.fail(outcome, call(headers=SHORT, stream=stream), times=20)
    assert provider.ask(None, call(stream=stream)) == "answered"


def test_route_timeout_is_counted() -> None:
    provider, one = GuardedProvider(), call(headers=SHORT)
    one.options = replace(one.options, timeout_configured=True)
    provider.fail(UpstreamTimeout("slow"), one)
    assert provider.ask(None, call()) == "CircuitBreakerOpen"


def test_failing_model_blocks_only_itself() -> None:
    provider = GuardedProvider()
    provider.fail(ProviderErrorReply("oops", status=500), call(model="broken"))
    assert provider.ask(None, call(model="broken")) == "CircuitBreakerOpen"
    assert provider.ask(None, call(model="good")) == "answered"


def test_failing_path_blocks_only_itself() -> None:
    provider = GuardedProvider()
    provider.fail(UpstreamBroken("a redirection"), call(dialect="raw", endpoint="v1/odd", model=""))
    assert provider.ask(None, call(dialect="raw", endpoint="v1/files", model="")) == "answered"


@pytest.mark.parametrize("outcome", [BAD_KEY, ProviderErrorReply("oops", status=500)])
def test_callers_own_key_is_counted_separately(outcome: Exception) -> None:
    provider, own = GuardedProvider(), call(headers={"authorization": "Bearer junk"})
    provider.fail(outcome, own, key=None)
    assert provider.ask(None, call()) == "answered"
    assert provider.ask(None, call(headers={"authorization": "Bearer good"}), key=None) == "answered"


def test_invalid_key_does_not_close_breaker_of_gateway_key() -> None:
    provider = GuardedProvider()
    provider.fail(UpstreamBroken("cut"), call())
    provider.ask(BAD_KEY, call(headers={"authorization": "Bearer junk"}), key=None)
    assert provider.ask(None, call()) == "CircuitBreakerOpen"


def test_failures_block_only_their_gateway() -> None:
    provider = GuardedProvider()
    provider.fail(UpstreamBroken("cut"), call(settings={"gateway": "one"}))
    assert provider.ask(None, call(settings={"gateway": "two"})) == "answered"


def test_number_of_breakers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BREAKERS", 8)
    provider = GuardedProvider()
    for number in range(100):
        provider.ask(UpstreamBroken("cut"), call(model=f"made-up-{number}"))
    assert len(provider.breakers._breakers) == 8


POOL = {"p": {"members": [{"provider": "a", "model": "x"}, {"provider": "b", "model": "y"}], "choose": "cheapest"}}


class Costs:
    def max_cost(self, call: GatewayRequest) -> int | None:
        return {"a": 1, "b": 2}[call.provider]


def _first_choices(*asked: tuple[GatewayRequest, int, str]) -> list[str]:
    """Return the pool member that each request tries first; `asked` has the outcome of that attempt."""
    chosen: list[str] = []
    layer_of = balance_pools(Costs(), ManualClock())
    met: dict[str, tuple[int, str]] = {}

    async def inner(call: GatewayRequest) -> GatewayReply:
        chosen.append(call.provider)
        status, outcome = met["now"]
        call.attempts.append(ProviderAttempt(call.provider, call.model, 0, 0, status, outcome, 0.1))
        return GatewayReply(200, {}, b"{}")

    layer = layer_of(inner)
    for one, status, outcome in asked:
        met["now"] = status, outcome
        asyncio.run(layer(one))  # type: ignore[arg-type]
    return chosen


def _pool_request(gateway: str = "default", **more: Any) -> GatewayRequest:
    settings = {"pools": POOL, "gateway": gateway}
    return call({"model": "p"}, provider="pool", model="p", settings=settings, **more)


def test_pool_counts_only_member_failures() -> None:
    assert _first_choices((_pool_request(), 0, "upstream_timeout"), (_pool_request(), 200, "answered")) == ["a", "b"]
    shortened = (_pool_request(headers=SHORT), 0, "upstream_timeout")
    assert _first_choices(shortened, (_pool_request(), 200, "answered")) == ["a", "a"]
    filtered = (_pool_request(), 403, "content_filter")
    assert _first_choices(filtered, (_pool_request(), 200, "answered")) == ["a", "a"]


def test_pool_failures_affect_only_their_gateway() -> None:
    failed = (_pool_request("one"), 503, "upstream_refused")
    assert _first_choices(failed, (_pool_request("two"), 200, "answered")) == ["a", "a"]


def test_slow_trial_blocks_others_for_longest_pause_at_most() -> None:
    provider = GuardedProvider()
    provider.fail(UpstreamBroken("cut"), call())
    provider.clock.advance(1.1)

    async def trial(_: object) -> str:
        with pytest.raises(CircuitBreakerOpen):
            await provider.breakers.run_with_breaker(call(), OpenAI(), "gateway-key", _attempt(None))
        provider.clock.advance(30.0)
        return await provider.breakers.run_with_breaker(call(), OpenAI(), "gateway-key", _attempt(None))

    assert asyncio.run(provider.breakers.run_with_breaker(call(), OpenAI(), "gateway-key", trial)) == "answered"


def test_open_breaker_raises_resting() -> None:
    provider = GuardedProvider()
    provider.fail(UpstreamBroken("cut"), call())
    with pytest.raises(CircuitBreakerOpen, match="5 times in a row for this model and key"):
        asyncio.run(provider.breakers.run_with_breaker(call(), OpenAI(), "gateway-key", _attempt(None)))
