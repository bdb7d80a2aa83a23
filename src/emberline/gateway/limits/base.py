"""Limiter: the interface of everything that counts usage against limits.

A reservation covers all of its claims or none. It is settled exactly once, and expires by itself if its holder dies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.rule import Claim, LimitUnit


class Grant(msgspec.Struct, frozen=True):
    """The part of a reservation that belongs to one claim."""

    claim: Claim
    slot: int
    amount: int  # less than claimed if less was left
    remaining: int
    resets_in_ms: int  # until the whole limit is available again


class Reservation(msgspec.Struct):
    name: str
    grants: tuple[Grant, ...]
    expires: int  # milliseconds on the counter's clock; unsettled amounts are released then
    is_local: bool = True  # counted in this process, not in Redis
    is_settled: bool = False


class BucketUsage(msgspec.Struct, frozen=True):
    """How much of one bucket is used now."""

    used: int  # including what is reserved
    resets_in_ms: int  # until none of it counts any longer


class LimiterStats(msgspec.Struct):
    """Counters of a limiter that is shared by all replicas."""

    reserved: int = 0  # reservations made in Redis
    degraded: int = 0  # reservations for which Redis was unavailable or refused
    pending_settlements: int = 0  # settlements waiting for Redis
    lost_settlements: int = 0  # settlements given up; their reservations expire in full


class Limiter(Protocol):
    @property
    def stats(self) -> LimiterStats | None:
        """Counters of a shared limiter; None if this process counts alone."""
        ...

    async def reserve(self, claims: Sequence[Claim], now: float, hold_s: float) -> Reservation:
        """Reserve all claims. Raises LimitExceeded or StoreFailed.

        `now` is in seconds since the epoch; `hold_s` is how many seconds the call may take.
        """
        ...

    def settle(self, reservation: Reservation, actual: Mapping[LimitUnit, int]) -> None:
        """Replace the reserved amounts by the amounts used. It never blocks or fails, so it can end a call."""
        ...

    async def bucket_usage(self, claims: Sequence[Claim], now: float) -> list[BucketUsage]:
        """Return the usage of each claim's bucket and reserve nothing. Raises StoreFailed.

        All claims must be of one gateway.
        """
        ...

    async def close(self) -> None:
        """Write all settlements, or give them up after a timeout."""
        ...


def limit_error(claim: Claim, remaining: int, wait_ms: int) -> LimitExceeded:
    rule = claim.rule
    seconds = max(1, math.ceil(wait_ms / 1000))
    return LimitExceeded(
        f"limit {rule.name!r} allows {rule.limit} {rule.amount} per {_period_text(claim)}; "
        f"{max(0, remaining)} are left and this call needs up to {claim.amount}",
        rule=rule.name,
        remaining=max(0, remaining),
        retry_after=seconds,
        is_budget=rule.amount == "micros",
        hint=f"retry in {seconds} s" + ("" if rule.amount == "requests" else ", or set a smaller max_tokens"),
    )


def _period_text(claim: Claim) -> str:
    return f"{claim.rule.per} s" if isinstance(claim.rule.per, int) else claim.rule.per
