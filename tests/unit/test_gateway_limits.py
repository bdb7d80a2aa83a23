"""Limits: windows, exactness against an oracle, settlement, expiry of reservations, and headers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits_oracle import RULES, START, STEPS, compare

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.base import ClaimGrant
from emberline.gateway.limits.bucket import LimitBucket
from emberline.gateway.limits.headers import build_rate_limit_headers, format_duration
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import LimitRule
from emberline.gateway.limits.window import DAY_MS, LimitWindow, Technique

MOMENTS = st.integers(0, 4_102_444_800_000)  # 1970 to 2100
HOLD = 60.0


def passes(limiter: LocalLimiter, rule: LimitRule, now: float, amount: int = 1) -> bool:
    try:
        reservation = asyncio.run(limiter.reserve([rule.make_claim({}, amount)], now, HOLD))
    except LimitExceeded:
        return False
    limiter.settle(reservation, {rule.amount: amount})
    return True


@given(MOMENTS)
def test_fixed_windows_follow_the_calendar(now: int) -> None:
    date = datetime.fromtimestamp(now // 1000, UTC)
    for period, begins in {
        "minute": date.replace(second=0),
        "hour": date.replace(minute=0, second=0),
        "day": date.replace(hour=0, minute=0, second=0),
        "month": date.replace(day=1, hour=0, minute=0, second=0),
    }.items():
        window = LimitWindow.for_period(period, "fixed")  # type: ignore[arg-type]
        first = int(begins.timestamp()) * 1000
        assert window.slot_at(first) == window.slot_at(now) and window.slot_at(first - 1) == window.slot_at(now) - 1
        assert window.usage_end_ms(window.slot_at(first - 1)) == first


def test_weeks_begin_on_monday() -> None:
    week = LimitWindow.for_period("week", "fixed")
    ends = week.usage_end_ms(week.slot_at(START))
    assert datetime.fromtimestamp(ends / 1000, UTC) == datetime(2026, 1, 5, tzinfo=UTC)
    assert datetime(2026, 1, 5).weekday() == 0


@given(st.integers(1, 10_000), MOMENTS)
def test_sliding_window_is_at_most_a_sixtieth_too_long(per: int, now: int) -> None:
    window = LimitWindow.for_period(per, "sliding")
    counted = window.usage_end_ms(window.slot_at(now)) - now
    assert 1000 * per <= counted <= 1000 * per + 2 * window.slot_ms
    assert window.live_slots <= 62


@settings(max_examples=300, deadline=None)
@given(RULES, STEPS)
def test_local_limiter_matches_the_oracle(rule: LimitRule, steps: list[tuple[str, int, int, int]]) -> None:
    asyncio.run(compare(LocalLimiter(), rule, steps))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 90), st.lists(st.integers(0, 30_000), max_size=60))
def test_no_interval_of_window_length_exceeds_the_limit(limit: int, per: int, gaps: list[int]) -> None:
    rule = LimitRule(name="r", limit=limit, per=per, technique="sliding")
    limiter, now, passed = LocalLimiter(), START, list[int]()
    for gap in gaps:
        now += gap
        if passes(limiter, rule, now / 1000):
            passed.append(now)
            assert len([at for at in passed if at > now - 1000 * per]) <= limit


def test_reservation_takes_all_claims_or_none() -> None:
    narrow, wide = LimitRule(name="narrow", limit=1), LimitRule(name="wide", limit=10)

    async def run() -> None:
        limiter = LocalLimiter()
        await limiter.reserve([wide.make_claim({}, 1), narrow.make_claim({}, 1)], 0, HOLD)
        for _ in range(5):
            with pytest.raises(LimitExceeded) as error:
                await limiter.reserve([wide.make_claim({}, 1), narrow.make_claim({}, 1)], 0, HOLD)
            assert error.value.rule == "narrow"
        after = await limiter.reserve([wide.make_claim({}, 1)], 0, HOLD)
        assert after.grants[0].remaining == 8

    asyncio.run(run())


def test_limit_error_has_retry_after() -> None:
    fixed, sliding = LimitRule(name="f", limit=2, per="hour"), LimitRule(name="s", limit=2, per=60, technique="sliding")
    money = LimitRule(name="m", limit=0, amount="micros", per="day")

    async def run() -> None:
        limiter, hour = LocalLimiter(), 3600 * 1000
        for at in (0, 30):
            await limiter.reserve([fixed.make_claim({}, 1), sliding.make_claim({}, 1)], hour + at, HOLD)
        with pytest.raises(LimitExceeded) as error:
            await limiter.reserve([fixed.make_claim({}, 1), sliding.make_claim({}, 1)], hour + 40, HOLD)
        assert (error.value.rule, error.value.retry_after) == ("f", 3560)  # the longest wait of the exceeded limits
        with pytest.raises(LimitExceeded) as error:
            await limiter.reserve([sliding.make_claim({}, 1)], hour + 40, HOLD)
        assert error.value.retry_after == 21  # the first call stops counting after a minute and a sixtieth
        assert error.value.status == 429 and error.value.code == "rate_limit_exceeded"
        with pytest.raises(LimitExceeded) as error:
            await limiter.reserve([money.make_claim({}, 1)], hour, HOLD)
        assert error.value.code == "budget_exceeded"

    asyncio.run(run())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.booleans()), max_size=40))
def test_budget_is_exceeded_by_less_than_one_reservation(limit: int, calls: list[tuple[int, int, bool]]) -> None:
    """Each call uses at most what it reserved, as a call with max_tokens does."""
    rule = LimitRule(name="b", limit=limit, amount="micros", per="month")

    async def run() -> None:
        limiter, running, used_total = LocalLimiter(), [], 0
        for reserved, used, ends in calls:
            with contextlib.suppress(LimitExceeded):
                running.append((await limiter.reserve([rule.make_claim({}, reserved)], 0, HOLD), min(used, reserved)))
            if running and ends:
                reservation, actual = running.pop(0)
                limiter.settle(reservation, {"micros": actual})
                used_total += actual
        assert used_total + sum(actual for _, actual in running) < limit + max((call[0] for call in calls), default=1)

    asyncio.run(run())


def test_settling_twice_fails_an_assertion() -> None:
    async def run() -> None:
        limiter = LocalLimiter()
        reservation = await limiter.reserve([LimitRule(name="r", limit=1).make_claim({}, 1)], 0, HOLD)
        limiter.settle(reservation, {"requests": 1})
        with pytest.raises(AssertionError):
            limiter.settle(reservation, {"requests": 1})

    asyncio.run(run())


def test_unused_buckets_are_swept() -> None:
    rule = LimitRule(name="r", limit=1, per=1, split=("user",))

    async def run() -> None:
        limiter = LocalLimiter()
        for i in range(5000):
            reservation = await limiter.reserve([rule.make_claim({"user": str(i)}, 1)], i / 100, HOLD)
            limiter.settle(reservation, {"requests": 1})
        assert limiter.bucket_count < 300  # 100 buckets are used per second

    asyncio.run(run())


def test_settled_reservations_leave_the_expiry_heap() -> None:
    rule = LimitRule(name="r", limit=10**9)

    async def run() -> None:
        limiter = LocalLimiter()
        for i in range(2000):
            limiter.settle(await limiter.reserve([rule.make_claim({}, 1)], i, 1e6), {"requests": 1})
        (bucket,) = limiter._buckets.values()
        assert len(bucket.expiry_heap) <= 66 and len(bucket.used) == 1

    asyncio.run(run())


# Rules


def test_rules_split_and_filter() -> None:
    rule = LimitRule(name="r", limit=1, split=("metadata.team",), only={"model": ("gpt-5",)})
    assert rule.applies_to({"model": "gpt-5"}) and not rule.applies_to({"model": "gpt-4"}) and not rule.applies_to({})
    buckets = [
        rule.make_claim({"gateway": "a/g", **facts}, 1).bucket for facts in ({"metadata.team": "x"}, {}, {"x": "y"})
    ]
    assert buckets[0] != buckets[1] == buckets[2]
    assert LimitRule(name="r", limit=1, named=True).applies_to({}, ("r",)) and not LimitRule(
        name="r", limit=1, named=True
    ).applies_to({})


def test_split_values_cannot_collide() -> None:
    rule = LimitRule(name="r", limit=1, split=("user", "model"))
    assert rule.make_claim({"user": 'a","b'}, 1).bucket != rule.make_claim({"user": "a", "model": "b"}, 1).bucket


@pytest.mark.parametrize(
    "rule",
    [
        {"limit": 1},
        {"name": "x", "limit": -1},
        {"name": "x", "limit": 1.5},
        {"name": "x", "limit": 2**53},
        {"name": "x", "limit": 1, "per": 0},
        {"name": "x", "limit": 1, "per": "fortnight"},
        {"name": "x", "limit": 1, "technique": "leaky"},
        {"name": "x", "limit": 1, "split": ["planet"]},
        {"name": "x", "limit": 1, "unknown": 1},
        {"name": "", "limit": 1},
    ],
)
def test_invalid_rule_is_rejected(rule: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        LimitRule.parse([rule])


def test_rule_names_must_be_unique_and_few() -> None:
    with pytest.raises(InvalidRequest):
        LimitRule.parse([{"name": "x", "limit": 1}, {"name": "x", "limit": 2}])
    with pytest.raises(InvalidRequest):
        LimitRule.parse([{"name": str(i), "limit": 1} for i in range(21)])


# Headers


def test_headers_report_the_tightest_limit() -> None:
    def grant(limit: int, left: int, resets: int, amount: str = "requests") -> ClaimGrant:
        rule = LimitRule(name="r", limit=limit, amount=amount)  # type: ignore[arg-type]
        return ClaimGrant(rule.make_claim({}, 1), 0, 1, left, resets)

    grants: Sequence[ClaimGrant] = [grant(100, 50, 500), grant(10, 1, 61_000), grant(5000, -3, 3_600_000, "tokens")]
    assert build_rate_limit_headers(grants) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "5000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1h0m0s",
    }
    assert [format_duration(ms) for ms in (0, 999, 1000, 1001, 59_000, 3_600_001)] == [
        "0ms",
        "999ms",
        "1s",
        "2s",
        "59s",
        "1h0m1s",
    ]


@pytest.mark.parametrize("technique", ["fixed", "sliding"])
def test_clock_that_jumps_ahead_and_back_does_not_block_a_limit(technique: Technique) -> None:
    """A limit per minute that was reached while the clock was a day ahead is free again after about a minute."""
    minute, now = 60_000, 1_800_000_000_000
    changes: Counter[int] = Counter()
    bucket = LimitBucket(LimitWindow.for_period("minute", technique))
    bucket.on_change = lambda slot, amount: changes.update({slot: amount})
    bucket.expire_until(now + DAY_MS)
    bucket.hold_amount("open", 4, now + 2 * DAY_MS)
    bucket.hold_amount("done", 6, now + 2 * DAY_MS)
    bucket.settle("done", None, 6)
    bucket.expire_until(now)
    assert bucket.grantable_amount(10, 1) is None, "setting the clock back does not free the limit"
    bucket.settle("open", None, 4)
    assert bucket.total == 10 and {slot: amount for slot, amount in changes.items() if amount} == bucket.used
    bucket.expire_until(now + 2 * minute + 2000)
    assert bucket.grantable_amount(10, 10) == 10 and bucket.total == 0


def test_clock_that_is_set_back_a_little_changes_nothing() -> None:
    now = 1_800_000_000_000
    bucket = LimitBucket(LimitWindow.for_period("minute", "fixed"))
    bucket.expire_until(now)
    bucket.hold_amount("a", 4, now + 1000)
    slot = bucket.slot
    bucket.expire_until(now - 30_000)
    assert bucket.slot == slot and bucket.used == {slot: 4}


def test_usage_restored_from_the_future_counts_now() -> None:
    now = 1_800_000_000_000
    bucket = LimitBucket(LimitWindow.for_period("minute", "fixed"))
    bucket.restore_usage({bucket.window.slot_at(now + DAY_MS): 7})
    bucket.expire_until(now)
    assert bucket.used == {bucket.window.slot_at(now): 7} and bucket.total == 7
