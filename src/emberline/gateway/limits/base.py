"""Limiter: the interface of the classes that count usage against limits.

A claim is an amount that a request needs of one limit. A reservation is granted for all of its claims or for none. It
is settled exactly once: the reserved amounts are replaced by the amounts that were used. If the process that made the
reservation dies, the reservation expires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.rule import Claim, LimitUnit


class ClaimGrant(msgspec.Struct, frozen=True):
    """The part of a reservation that belongs to one claim."""

    claim: Claim
    slot: int
    amount: int  # less than claimed if less was left
    remaining: int
    resets_in_ms: int  # until the whole limit is available again


class Reservation(msgspec.Struct):
    name: str
    grants: tuple[ClaimGrant, ...]
    expires: int  # milliseconds on the counter's clock; unsettled amounts are released then
    is_local: bool = True  # counted in this process, not in Redis
    is_settled: bool = False


class BucketUsage(msgspec.Struct, frozen=True):
    """How much of one bucket (the counter of a limit) is used now."""

    used: int  # including what is reserved
    resets_in_ms: int  # until none of it counts any longer


class LimiterStats(msgspec.Struct):
    """Counters of this process about its reservations and settlements in Redis."""

    reserved: int = 0  # reservations made in Redis
    degraded: int = 0  # reservations for which Redis was unavailable or refused
    pending_settlements: int = 0  # settlements waiting for Redis
    lost_settlements: int = 0  # settlements given up; their reservations expire in full


class Limiter(Protocol):
    @property
    def stats(self) -> LimiterStats | None:
        """Counters about reservations in Redis, or None for a limiter that does not use Redis."""
        ...

    async def reserve(self, claims: Sequence[Claim], now: float, expires_after_s: float) -> Reservation:
        """Reserve the amounts of all claims.

        Raise LimitExceeded if a limit has too little left, and StoreFailed if the limits cannot be checked. `now` is in
        seconds since 1970. The reservation expires after `expires_after_s` seconds unless it is settled before.
        """
        ...

    def settle(self, reservation: Reservation, used_amounts: Mapping[LimitUnit, int]) -> None:
        """Replace the reserved amounts by the amounts that were used.

        This method never blocks and never fails.
        """
        ...

    async def read_bucket_usage(self, claims: Sequence[Claim], now: float) -> list[BucketUsage]:
        """Return the usage of each claim's bucket without reserving anything.

        All claims must belong to the same gateway. Raise StoreFailed if the usage cannot be read.
        """
        ...

    async def close(self) -> None:
        """Wait until all settlements are written, or until a timeout passes."""
        ...


def make_limit_exceeded_error(claim: Claim, remaining: int, wait_ms: int) -> LimitExceeded:
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
