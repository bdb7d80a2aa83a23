"""Pools: order of members, statistics of outcomes, and hedged requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from gateway_requests import Pieces, call

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest, ModelNotFound
from emberline.gateway.core.cost import Price
from emberline.gateway.core.errors import Forbidden, UpstreamFailed
from emberline.gateway.core.identity import Identity
from emberline.gateway.core.pool import ModelPool, PoolMember
from emberline.gateway.core.request import GatewayReply, GatewayRequest, ProviderAttempt
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.core.token_estimate import estimate_input_tokens
from emberline.gateway.layers.hedging import hedge_slow_calls
from emberline.gateway.layers.load_balancing import balance_pools
from emberline.gateway.providers.base import CHANGED_HEADER
from emberline.gateway.routes.load_balancer import EXPLORATION_SHARE, MIN_SAMPLES, LoadBalancer
from emberline.wire.usage import Usage

A, B, C = (PoolMember(provider=name, model="m", weight=weight) for name, weight in (("a", 6), ("b", 3), ("c", 1)))
ABC = (A, B, C)


def first(balance: LoadBalancer, choose: Any, costs: Any = (None, None, None), seed: Any = 1, now: float = 0.0) -> str:
    pool = ModelPool(members=ABC, choose=choose)
    chance = random.Random(seed).random
    return balance.order_members(pool, ABC, costs, chance, is_streamed=True, now=now)[0].provider


def test_weighted_pool_follows_weights() -> None:
    counts = Counter(first(LoadBalancer(), "weighted", seed=i) for i in range(3000))
    assert abs(counts["a"] - 1800) < 120 and abs(counts["b"] - 900) < 120 and abs(counts["c"] - 300) < 120


def test_member_with_weight_zero_is_last() -> None:
    pool = ModelPool(members=(PoolMember(provider="z", model="m", weight=0), A))
    for seed in range(50):
        order = LoadBalancer().order_members(
            pool, pool.members, (None, None), random.Random(seed).random, is_streamed=True, now=0
        )
        assert [member.provider for member in order] == ["a", "z"]


def test_cheapest_pool_puts_unknown_prices_last() -> None:
    balance = LoadBalancer()
    assert {first(balance, "cheapest", (30, 20, None), i) for i in range(50)} == {"b"}
    order = balance.order_members(
        ModelPool(members=ABC, choose="cheapest"), ABC, (None, 20, 10), random.random, is_streamed=True, now=0
    )
    assert [member.provider for member in order] == ["c", "b", "a"]


def test_fastest_pool_explores_other_members_sometimes() -> None:
    balance = LoadBalancer()
    for seconds, member in ((0.5, A), (0.1, B), (0.3, C)):
        for _ in range(5):
            balance.record_success(member.member_key, seconds, is_streamed=True)
    counts = Counter(first(balance, "fastest", seed=i) for i in range(4000))
    elsewhere = 4000 - counts["b"]
    assert 0.4 * EXPLORATION_SHARE < elsewhere / 4000 < EXPLORATION_SHARE and counts["a"] > counts["c"] > 0
    for _ in range(30):
        balance.record_success(B.member_key, 2.0, is_streamed=True)
    assert Counter(first(balance, "fastest", seed=i) for i in range(200)).most_common(1)[0][0] == "c"


def test_untried_member_is_tried() -> None:
    balance = LoadBalancer()
    balance.record_success(A.member_key, 0.01, is_streamed=True)
    balance.record_success(B.member_key, 0.01, is_streamed=False)  # durations of whole replies are separate
    assert "a" not in {first(balance, "fastest", seed=i) for i in range(2, 20)}


def test_failed_member_has_growing_backoff_and_recovers() -> None:
    balance = LoadBalancer()
    balance.record_failure(B.member_key, 503, 100.0)
    costs = (30, 20, 40)
    assert first(balance, "cheapest", costs, now=100.5) == "a"
    assert first(balance, "cheapest", costs, now=101.0) == "b"
    balance.record_failure(B.member_key, 0, 101.0)
    assert first(balance, "cheapest", costs, now=102.5) == "a"
    balance.record_success(B.member_key, 0.1, is_streamed=True)
    assert first(balance, "cheapest", costs, now=102.5) == "b"
    balance.record_failure(B.member_key, 400, 103.0)
    assert first(balance, "cheapest", costs, now=103.0) == "b", "the request itself was invalid"
    for _ in range(50):
        balance.record_failure(B.member_key, 429, 200.0)
    assert first(balance, "cheapest", costs, now=231.0) == "b", "back-off is bounded"


def test_slow_latency_is_95th_percentile() -> None:
    balance = LoadBalancer()
    for i in range(MIN_SAMPLES - 1):
        balance.record_success(A.member_key, i / 100, is_streamed=True)
    assert balance.hedge_delay_s(A, True) is None, "too few samples"
    for i in range(MIN_SAMPLES - 1, 100):
        balance.record_success(A.member_key, i / 100, is_streamed=True)
    assert balance.hedge_delay_s(A, True) == pytest.approx(0.94)
    assert balance.hedge_delay_s(A, False) is None


@pytest.mark.parametrize(
    "members",
    [[], [{"provider": "a", "model": "m"}] * 2, [{"provider": "a", "model": "m", "weight": 0}], [{"provider": "a"}]],
)
def test_invalid_pools_are_refused(members: Any) -> None:
    with pytest.raises(InvalidRequest):
        GatewaySettings.parse({"pools": {"p": {"members": members}}})


# -- the layer ---------------------------------------------------------------------------------------------------------

POOL = {"p": {"choose": "cheapest", "hedge": True, "members": [
    {"provider": "a", "model": "x"}, {"provider": "b", "model": "y", "key": "second"}]}}  # fmt: skip


class Costs:
    def max_cost(self, call: GatewayRequest) -> int | None:
        return {"a": 5, "b": 3}[call.provider]


def pool_request(**more: Any) -> GatewayRequest:
    return call({"model": "p"}, provider="pool", model=more.pop("model", "p"), settings={"pools": POOL}, **more)


def test_pool_becomes_steps_and_records_outcomes() -> None:
    seen: list[GatewayRequest] = []

    async def inner(call: GatewayRequest) -> GatewayReply:
        seen.append(call)
        call.attempts.append(ProviderAttempt("b", "y", 0, 0, 503, "upstream_refused", 0.1, "second"))
        call.attempts.append(ProviderAttempt("a", "x", 1, 0, 200, "answered", 0.2))
        return GatewayReply(200, {}, b"{}")

    layer = balance_pools(Costs(), ManualClock())(inner)
    asyncio.run(layer(pool_request(headers={"authorization": "Bearer of-another"})))
    one = seen[0]
    assert (one.provider, one.model, one.options.byok_alias, one.headers) == ("b", "y", "second", {})
    assert [(s.provider, s.model, s.options and s.options.byok_alias) for s in one.steps] == [
        ("b", "y", "second"),
        ("a", "x", None),
    ]
    assert one.hedge_delay_s is None, "no statistics yet"
    asyncio.run(layer(pool_request()))
    assert seen[1].provider == "a", "the other one failed"


def test_key_uses_only_allowed_members_of_a_pool() -> None:
    async def inner(call: GatewayRequest) -> GatewayReply:
        assert [step.provider for step in call.steps] == ["a"]
        return GatewayReply(200, {}, b"{}")

    layer = balance_pools(Costs(), ManualClock())(inner)
    asyncio.run(layer(pool_request(identity=Identity("k", "k", "virtual", allowed_providers=("a",)))))
    with pytest.raises(Forbidden):
        asyncio.run(layer(pool_request(identity=Identity("k", "k", "virtual", allowed_providers=("z",)))))
    with pytest.raises(ModelNotFound):
        asyncio.run(layer(pool_request(model="q")))
    seen = []

    async def every(call: GatewayRequest) -> GatewayReply:
        seen.append({step.provider for step in call.steps})
        return GatewayReply(200, {}, b"{}")

    sent_request = pool_request(identity=Identity("k", "k", "virtual", allowed_models=("dynamic/r",))).with_changes(
        access_granted=True
    )
    asyncio.run(balance_pools(Costs(), ManualClock())(every)(sent_request))
    assert seen == [{"a", "b"}], "a route grants access"


# -- hedging -----------------------------------------------------------------------------------------------------------


class Prices:
    def price(self, settings: GatewaySettings, provider: str, model: str) -> Price | None:
        return Price(input=1_000_000, output=2_000_000)  # 1 micro-dollar per input token

    def max_output(self, provider: str, model: str) -> int | None:
        return None


class RacingProviders:
    """Providers that wait for their event, then answer or fail."""

    def __init__(self, **behaviour: Any) -> None:
        self.does = behaviour
        self.go = {name: asyncio.Event() for name in behaviour}
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    async def __call__(self, call: GatewayRequest) -> GatewayReply:
        """Like RetryHandler, remove the changes of an earlier attempt and report this one's."""
        self.begun.append(call.provider)
        call.reply_headers.pop(CHANGED_HEADER, None)
        call.reply_headers[CHANGED_HEADER] = f"field={call.provider}"
        try:
            await self.go[call.provider].wait()
        except asyncio.CancelledError:
            self.cancelled.append(call.provider)
            raise
        behaviour = self.does[call.provider]
        if isinstance(behaviour, Exception):
            raise behaviour
        reply = GatewayReply(200, {}, behaviour, provider=call.provider, step_index=call.step_index)
        reply.usage, reply.micros = Usage(input=10, output=5), 20
        return reply


def race(
    behaviour: dict[str, Any], go: list[str], hedge: float = 0.0
) -> tuple[GatewayReply, RacingProviders, GatewayRequest]:
    """`go`: providers that may answer, in this order."""

    async def run() -> tuple[GatewayReply, RacingProviders, GatewayRequest]:
        racers = RacingProviders(**behaviour)
        sent_request = pool_request()
        steps = balance_pools(Costs(), ManualClock())

        async def with_hedge(call: GatewayRequest) -> GatewayReply:
            return await hedge_slow_calls(Prices(), ManualClock())(racers)(call.with_changes(hedge_delay_s=hedge))

        task = asyncio.ensure_future(steps(with_hedge)(sent_request))
        for name in go:
            for _ in range(10):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            racers.go[name].set()
        reply = await asyncio.wait_for(task, 5)
        await reply.close()
        return reply, racers, sent_request

    return asyncio.run(run())


INPUT = estimate_input_tokens(pool_request().body)


def test_hedge_wins_and_first_is_cancelled_and_billed() -> None:
    reply, racers, sent_request = race({"b": b"1", "a": b"2"}, ["a"])
    assert (reply.body, reply.step_index, racers.begun, racers.cancelled) == (b"2", 1, ["b", "a"], ["b"])
    assert (reply.micros, reply.usage, reply.estimated) == (20 + INPUT, Usage(input=10 + INPUT, output=5), True)
    assert [(tried.provider, tried.outcome, tried.key) for tried in sent_request.attempts] == [
        ("b", "outrun", "second")
    ]


def test_first_wins_after_hedge_started() -> None:
    reply, racers, _ = race({"b": b"1", "a": b"2"}, ["b"])
    assert (reply.body, reply.step_index, racers.cancelled, reply.micros) == (b"1", 0, ["a"], 20 + INPUT)


def test_no_hedge_if_first_answers_in_time() -> None:
    reply, racers, _ = race({"b": b"1", "a": b"2"}, ["b"], hedge=5.0)
    assert (reply.body, racers.begun, reply.micros, reply.estimated) == (b"1", ["b"], 20, False)


def test_hedge_answers_if_first_fails() -> None:
    assert race({"b": UpstreamFailed("no"), "a": b"2"}, ["b", "a"])[0].body == b"2"
    assert race({"b": b"1", "a": UpstreamFailed("no")}, ["a", "b"])[0].body == b"1"
    with pytest.raises(UpstreamFailed, match="first"):
        race({"b": UpstreamFailed("first"), "a": UpstreamFailed("second")}, ["a", "b"])


@pytest.mark.parametrize("winner", ["a", "b"])
def test_changes_of_the_winner_are_reported(winner: str) -> None:
    _, racers, sent_request = race({"b": b"1", "a": b"2"}, [winner])
    assert sorted(racers.begun) == ["a", "b"]
    assert sent_request.reply_headers == {CHANGED_HEADER: f"field={winner}"}


def test_both_answer_and_one_is_closed_and_billed() -> None:
    streams = {"b": Pieces(b"1"), "a": Pieces(b"2")}

    async def run() -> GatewayReply:
        racers = RacingProviders(**streams)
        sent_request = pool_request()
        layer = hedge_slow_calls(Prices(), ManualClock())(racers)
        steps = balance_pools(Costs(), ManualClock())
        task = asyncio.ensure_future(steps(lambda call: layer(call.with_changes(hedge_delay_s=0.0)))(sent_request))
        await asyncio.sleep(0.01)
        for go in racers.go.values():
            go.set()
        return await task

    reply = asyncio.run(run())
    assert reply.body is streams["b"] and streams["a"].closed and not streams["b"].closed
    asyncio.run(reply.close())
    assert reply.micros == 40


def test_client_disconnect_cancels_both() -> None:
    async def run() -> list[str]:
        racers = RacingProviders(b=b"1", a=b"2")
        layer = hedge_slow_calls(Prices(), ManualClock())(racers)
        steps = balance_pools(Costs(), ManualClock())
        task = asyncio.ensure_future(steps(lambda call: layer(call.with_changes(hedge_delay_s=0.0)))(pool_request()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return racers.cancelled

    assert sorted(asyncio.run(run())) == ["a", "b"]
