"""The layer that enforces limits on realtime sessions, separately for each response of the model.

When the provider reports the usage of a response, this usage is counted and capacity for the next response is reserved.
If no capacity is left, the session ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.clock import Clock
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, Layer
from emberline.gateway.layers.rate_limiting import RESERVATION_GRACE_S
from emberline.gateway.limits.base import Limiter, Reservation
from emberline.gateway.limits.claims import ClaimBuilder
from emberline.gateway.limits.rule import Claim
from emberline.gateway.realtime.handler import RealtimeReply
from emberline.wire.usage import Usage


def limit_sessions(limiter: Limiter, claim_builder: ClaimBuilder, clock: Clock, wall_clock: Clock) -> Layer:
    """Return the layer for realtime sessions.

    `clock` is monotonic; `wall_clock` returns seconds since 1970.
    """

    def layer(inner: Handler) -> Handler:
        async def handle(call: GatewayRequest) -> GatewayReply:
            claims = claim_builder.build_claims(call)
            if not claims:
                return await inner(call)
            reservations = _SessionReservations(call, limiter, clock, wall_clock)
            await reservations.reserve(claims)
            try:
                reply = await inner(call)
            except BaseException:
                reservations.settle(requests=1)
                raise
            assert isinstance(reply, RealtimeReply)
            reply.on_usage = reservations.settle_response
            reply.close_callbacks.append(reservations.settle_on_end)
            return reply

        return handle

    return layer


@dataclass(slots=True)
class _SessionReservations:
    call: GatewayRequest
    limiter: Limiter
    clock: Clock
    wall: Clock
    reservation: Reservation | None = None  # for the next response
    is_first_response: bool = True

    async def reserve(self, claims: list[Claim]) -> None:
        left = self.call.deadline - self.clock.now() + RESERVATION_GRACE_S
        self.reservation = await self.limiter.reserve(claims, self.wall.now(), left)

    def settle(self, *, requests: int, tokens: int = 0, micros: int = 0) -> list[Claim]:
        """Replace the open reservation, if there is one, by the actual use.

        Return the claims of the reservation. A claim is the amount that was reserved of one limit.
        """
        if (reservation := self.reservation) is None:
            return []
        self.reservation = None
        self.limiter.settle(reservation, {"requests": requests, "tokens": tokens, "micros": micros})
        return [grant.claim for grant in reservation.grants]

    async def settle_response(self, usage: Usage, micros: int) -> None:
        claims = self.settle(requests=int(self.is_first_response), tokens=usage.total, micros=micros)
        self.is_first_response = False
        if recurring := [claim for claim in claims if claim.rule.amount != "requests"]:
            await self.reserve(recurring)

    async def settle_on_end(self, reply: GatewayReply) -> None:
        self.settle(requests=int(self.is_first_response))
