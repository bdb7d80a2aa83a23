"""Limiter: who counts. A reservation is all of its claims or none; it is settled exactly once, and comes back by itself
when its holder is gone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from emberline.gateway.errors import LimitExceeded
from emberline.gateway.limits.rule import Amount, Claim


class Grant(msgspec.Struct, frozen=True):
    """What one claim got."""

    claim: Claim
    slot: int
    amount: int  # less than claimed where only so much was left
    remaining: int
    resets: int  # milliseconds until all of the limit is there again


class Reservation(msgspec.Struct):
    name: str
    grants: tuple[Grant, ...]
    expires: int  # by the counter's clock, milliseconds: then it has come back
    local: bool = True  # counted in this process
    settled: bool = False


class Spent(msgspec.Struct, frozen=True):
    """What counts of one bucket now."""

    used: int  # what is held among it
    resets: int  # milliseconds until none of it counts


class LimiterStats(msgspec.Struct):
    """Of one that counts elsewhere, for all replicas."""

    reserved: int = 0  # there
    degraded: int = 0  # it could not be asked, or refused
    owed: int = 0  # settlements that wait for it
    lost: int = 0  # settlements given up: their reservations come back whole


class Limiter(Protocol):
    @property
    def stats(self) -> LimiterStats | None:
        """None: all is counted here."""
        ...

    async def reserve(self, claims: Sequence[Claim], now: float, hold: float) -> Reservation:
        """`now`: seconds since the epoch; `hold`: seconds the call may take. Raises LimitExceeded, or StoreFailed."""
        ...

    def settle(self, reservation: Reservation, actual: Mapping[Amount, int]) -> None:
        """What was really used, in place of what was reserved. Never waits and never fails, so it can end a call."""
        ...

    async def spent(self, claims: Sequence[Claim], now: float) -> list[Spent]:
        """Of each one's bucket; all are of one gateway. Takes nothing. Raises StoreFailed."""
        ...

    async def close(self) -> None:
        """All that was settled has been written, or given up."""
        ...


def refusal(claim: Claim, remaining: int, wait: int) -> LimitExceeded:
    rule = claim.rule
    seconds = max(1, math.ceil(wait / 1000))
    return LimitExceeded(
        f"limit {rule.name!r} allows {rule.limit} {rule.amount} per {_period(claim)}; "
        f"{max(0, remaining)} are left and this call would take {claim.amount}",
        rule=rule.name,
        remaining=max(0, remaining),
        retry_after=seconds,
        money=rule.amount == "micros",
        hint=f"wait {seconds} s" + ("" if rule.amount == "requests" else ", or ask for fewer tokens"),
    )


def _period(claim: Claim) -> str:
    return f"{claim.rule.per} s" if isinstance(claim.rule.per, int) else claim.rule.per
