"""Limited sessions: a realtime socket passes as a call does, and then each of its answers does: what one used is
settled when it is told, and the next is reserved. Where there is no room for that, the session ends."""

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
    """`clock` is monotonic, `wall` tells seconds since 1970."""

    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            claims = claimed.of(call)
            if not claims:
                return await inner(call)
            answers = _Answers(call, limiter, clock, wall)
            await answers.reserve(claims)
            try:
                reply = await inner(call)
            except BaseException:
                answers.settle(requests=1)
                raise
            assert isinstance(reply, Joined)
            reply.answered = answers.one
            reply.endings.append(answers.ended)
            return reply

        return handle

    return layer


@dataclass(slots=True)
class _Answers:
    call: Call
    limiter: Limiter
    clock: Clock
    wall: Clock
    held: Reservation | None = None  # for the next
    is_first: bool = True

    async def reserve(self, claims: list[Claim]) -> None:
        left = self.call.deadline - self.clock.now() + GRACE
        self.held = await self.limiter.reserve(claims, self.wall.now(), left)

    def settle(self, *, requests: int, tokens: int = 0, micros: int = 0) -> list[Claim]:
        """What was held for; nothing of it is, any more."""
        if (held := self.held) is None:
            return []
        self.held = None
        self.limiter.settle(held, {"requests": requests, "tokens": tokens, "micros": micros})
        return [grant.claim for grant in held.grants]

    async def one(self, usage: Usage, micros: int) -> None:
        claims = self.settle(requests=int(self.is_first), tokens=usage.total, micros=micros)
        self.is_first = False
        if again := [claim for claim in claims if claim.rule.amount != "requests"]:
            await self.reserve(again)

    async def ended(self, reply: Reply) -> None:
        self.settle(requests=int(self.is_first))
