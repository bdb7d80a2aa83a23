"""The layer that enforces limits on realtime sessions, for each response of the model separately.

What a response used is settled when the provider reports it, and capacity for the next one is reserved. If none is
left, the session ends."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.clock import Clock
from emberline.gateway.call import Call, Handler, Layer, Reply
from emberline.gateway.costs.usage import Usage
from emberline.gateway.layers.limited import GRACE
from emberline.gateway.limits.base import Limiter, Reservation
from emberline.gateway.limits.claims import Claims
from emberline.gateway.limits.rule import Claim
from emberline.gateway.realtime.realtime import Joined


def limited_sessions(limiter: Limiter, claimed: Claims, clock: Clock, wall: Clock) -> Layer:
    """Return the layer for realtime sessions. `clock` is monotonic; `wall` is in seconds since the epoch."""

    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            claims = claimed.of(call)
            if not claims:
                return await inner(call)
            reservations = _Answers(call, limiter, clock, wall)
            await reservations.reserve(claims)
            try:
                reply = await inner(call)
            except BaseException:
                reservations.settle(requests=1)
                raise
            assert isinstance(reply, Joined)
            reply.answered = reservations.one
            reply.endings.append(reservations.ended)
            return reply

        return handle

    return layer


@dataclass(slots=True)
class _Answers:
    call: Call
    limiter: Limiter
    clock: Clock
    wall: Clock
    held: Reservation | None = None  # for the next response
    is_first: bool = True

    async def reserve(self, claims: list[Claim]) -> None:
        left = self.call.deadline - self.clock.now() + GRACE
        self.held = await self.limiter.reserve(claims, self.wall.now(), left)

    def settle(self, *, requests: int, tokens: int = 0, micros: int = 0) -> list[Claim]:
        """Settle the reservation, if there is one, and return its claims."""
        if (reservation := self.held) is None:
            return []
        self.held = None
        self.limiter.settle(reservation, {"requests": requests, "tokens": tokens, "micros": micros})
        return [grant.claim for grant in reservation.grants]

    async def one(self, usage: Usage, micros: int) -> None:
        claims = self.settle(requests=int(self.is_first), tokens=usage.total, micros=micros)
        self.is_first = False
        if recurring := [claim for claim in claims if claim.rule.amount != "requests"]:
            await self.reserve(recurring)

    async def ended(self, reply: Reply) -> None:
        self.settle(requests=int(self.is_first))
