"""Breakers and pools: what one caller does with its own timeout, key or model does not stop the calls of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gateway_calls import call

from emberline.core.clock import ManualClock
from emberline.gateway.call import Attempted, Call, Reply
from emberline.gateway.errors import Broken, Refused, Resting, TimedOut, Unreached, UpstreamFailed
from emberline.gateway.layers.balanced import balanced
from emberline.gateway.providers import breakers as module
from emberline.gateway.providers.breakers import Breakers
from emberline.gateway.providers.openai import OpenAI

SHORT = {"cf-aig-request-timeout": "1"}
BAD_KEY = Refused("no", kind="access", status=401)


def _attempt(outcome: Exception | None) -> Callable[[Any], Any]:
    async def attempt(_: object) -> str:
        if outcome is not None:
            raise outcome
        return "answered"

    return attempt


class Guarded:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.breakers = Breakers(self.clock)

    def ask(self, outcome: Exception | None, one: Call, key: str | None = "gateway-key") -> str:
        try:
            return asyncio.run(self.breakers.guard(one, OpenAI(), key, _attempt(outcome)))
        except UpstreamFailed as e:
            return type(e).__name__

    def fail(self, outcome: Exception, one: Call, key: str | None = "gateway-key", times: int = 5) -> None:
        for _ in range(times):
            self.ask(outcome, one, key)


@pytest.mark.parametrize("outcome", [TimedOut("slow"), Broken("cut"), Unreached("gone"), Refused("oops", status=500)])
def test_failures_of_the_provider_open_the_breaker(outcome: Exception) -> None:
    guarded = Guarded()
    guarded.fail(outcome, call())
    assert guarded.ask(None, call()) == "Resting"
    assert dict(guarded.breakers) == {OpenAI().origin: 1}
    guarded.clock.advance(1.1)
    assert guarded.ask(None, call()) == "answered" and dict(guarded.breakers) == {}


@pytest.mark.parametrize("outcome", [TimedOut("slow"), Unreached("no connection within 0.001 s")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_that_the_caller_shortened_is_not_counted(outcome: Exception, stream: bool) -> None:
    guarded = Guarded()
    guarded.fail(outcome, call(headers=SHORT, stream=stream), times=20)
    assert guarded.ask(None, call(stream=stream)) == "answered"


def test_a_timeout_that_a_route_configured_is_counted() -> None:
    guarded, one = Guarded(), call(headers=SHORT)
    one.options = replace(one.options, timeout_configured=True)
    guarded.fail(TimedOut("slow"), one)
    assert guarded.ask(None, call()) == "Resting"


def test_a_bad_model_stops_only_itself() -> None:
    guarded = Guarded()
    guarded.fail(Refused("oops", status=500), call(model="broken"))
    assert guarded.ask(None, call(model="broken")) == "Resting"
    assert guarded.ask(None, call(model="good")) == "answered"


def test_a_bad_path_stops_only_itself() -> None:
    guarded = Guarded()
    guarded.fail(Broken("a redirection"), call(dialect="raw", endpoint="v1/odd", model=""))
    assert guarded.ask(None, call(dialect="raw", endpoint="v1/files", model="")) == "answered"


@pytest.mark.parametrize("outcome", [BAD_KEY, Refused("oops", status=500)])
def test_a_callers_own_key_counts_for_itself(outcome: Exception) -> None:
    guarded, own = Guarded(), call(headers={"authorization": "Bearer junk"})
    guarded.fail(outcome, own, key=None)
    assert guarded.ask(None, call()) == "answered"
    assert guarded.ask(None, call(headers={"authorization": "Bearer good"}), key=None) == "answered"


def test_a_junk_key_does_not_close_the_breaker_of_the_gateways_key() -> None:
    guarded = Guarded()
    guarded.fail(Broken("cut"), call())
    guarded.ask(BAD_KEY, call(headers={"authorization": "Bearer junk"}), key=None)
    assert guarded.ask(None, call()) == "Resting"


def test_another_gateway_is_not_stopped() -> None:
    guarded = Guarded()
    guarded.fail(Broken("cut"), call(settings={"gateway": "one"}))
    assert guarded.ask(None, call(settings={"gateway": "two"})) == "answered"


def test_models_named_by_callers_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BREAKERS", 8)
    guarded = Guarded()
    for number in range(100):
        guarded.ask(Broken("cut"), call(model=f"made-up-{number}"))
    assert len(guarded.breakers._failing) == 8


POOL = {"p": {"members": [{"provider": "a", "model": "x"}, {"provider": "b", "model": "y"}], "choose": "cheapest"}}


class Costs:
    def at_most(self, call: Call) -> int | None:
        return {"a": 1, "b": 2}[call.provider]


def _first_choices(*asked: tuple[Call, int, str]) -> list[str]:
    """The member that each call asks first; each is given the status and the code that it meets there."""
    chosen: list[str] = []
    layer_of = balanced(Costs(), ManualClock())
    met: dict[str, tuple[int, str]] = {}

    async def inner(call: Call) -> Reply:
        chosen.append(call.provider)
        status, outcome = met["now"]
        call.trail.append(Attempted(call.provider, call.model, 0, 0, status, outcome, 0.1))
        return Reply(200, {}, b"{}")

    layer = layer_of(inner)
    for one, status, outcome in asked:
        met["now"] = status, outcome
        asyncio.run(layer(one))  # type: ignore[arg-type]
    return chosen


def _pooled(gateway: str = "default", **more: Any) -> Call:
    settings = {"pools": POOL, "gateway": gateway}
    return call({"model": "p"}, provider="pool", model="p", settings=settings, **more)


def test_a_pool_learns_from_failures_of_its_members_only() -> None:
    assert _first_choices((_pooled(), 0, "upstream_timeout"), (_pooled(), 200, "answered")) == ["a", "b"]
    shortened = (_pooled(headers=SHORT), 0, "upstream_timeout")
    assert _first_choices(shortened, (_pooled(), 200, "answered")) == ["a", "a"]
    filtered = (_pooled(), 403, "content_filter")
    assert _first_choices(filtered, (_pooled(), 200, "answered")) == ["a", "a"]


def test_a_pool_of_another_gateway_is_not_moved() -> None:
    failed = (_pooled("one"), 503, "upstream_refused")
    assert _first_choices(failed, (_pooled("two"), 200, "answered")) == ["a", "a"]


def test_a_trial_that_takes_long_does_not_stop_others_for_longer_than_the_longest_pause() -> None:
    guarded = Guarded()
    guarded.fail(Broken("cut"), call())
    guarded.clock.advance(1.1)

    async def trial(_: object) -> str:
        with pytest.raises(Resting):
            await guarded.breakers.guard(call(), OpenAI(), "gateway-key", _attempt(None))
        guarded.clock.advance(30.0)
        return await guarded.breakers.guard(call(), OpenAI(), "gateway-key", _attempt(None))

    assert asyncio.run(guarded.breakers.guard(call(), OpenAI(), "gateway-key", trial)) == "answered"


def test_an_open_breaker_is_told_as_resting() -> None:
    guarded = Guarded()
    guarded.fail(Broken("cut"), call())
    with pytest.raises(Resting, match="5 times in a row for this model and key"):
        asyncio.run(guarded.breakers.guard(call(), OpenAI(), "gateway-key", _attempt(None)))
