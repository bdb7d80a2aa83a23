"""The layer that enforces limits.

A request passes if every limit rule that applies to it has capacity left. The layer first reserves the most that the
request may use. When the reply ends, the reservation is replaced by the actual use. A cached reply counts as one
request and costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from emberline.core.clock import Clock
from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, Layer
from emberline.gateway.costs.billing import PriceSource
from emberline.gateway.limits.base import Limiter
from emberline.gateway.limits.claims import ClaimBuilder, ModelLookup
from emberline.gateway.limits.headers import build_rate_limit_headers, format_duration
from emberline.gateway.limits.rule import Claim, LimitUnit

RESERVATION_GRACE_S = 5.0  # how long a reservation outlasts the deadline of its call


def limit_calls(limiter: Limiter, models: ModelLookup, prices: PriceSource, clock: Clock, wall_clock: Clock) -> Layer:
    """Return the layer that enforces limits.

    `clock` is monotonic; `wall_clock` returns seconds since 1970.
    """
    claim_builder = ClaimBuilder(models, prices)

    def layer(inner: Handler) -> Handler:
        async def handle(call: GatewayRequest) -> GatewayReply:
            claims = claim_builder.build_claims(call)
            if not claims:
                return await inner(call)
            try:
                reservation = await limiter.reserve(
                    claims, wall_clock.now(), call.deadline - clock.now() + RESERVATION_GRACE_S
                )
            except LimitExceeded as e:
                call.reply_headers.update(_limit_exceeded_headers(claims, e))
                raise
            call.reply_headers.update(build_rate_limit_headers(reservation.grants))
            try:
                reply = await inner(call)
            except BaseException:
                limiter.settle(reservation, {"requests": int(call.is_last_step)})  # the last step counts the request
                raise

            async def settle_on_end(reply: GatewayReply) -> None:
                limiter.settle(reservation, _actual_usage(reply))

            reply.close_callbacks.append(settle_on_end)
            return reply

        return handle

    return layer


def _actual_usage(reply: GatewayReply) -> Mapping[LimitUnit, int]:
    if reply.cached or reply.usage is None:
        return {"requests": 1, "micros": reply.micros or 0}
    return {"requests": 1, "tokens": reply.usage.total, "micros": reply.micros or 0}


def _limit_exceeded_headers(claims: list[Claim], error: LimitExceeded) -> dict[str, str]:
    rule = next(claim.rule for claim in claims if claim.rule.name == error.rule)
    return {
        f"x-ratelimit-limit-{rule.amount}": str(rule.limit),
        f"x-ratelimit-remaining-{rule.amount}": str(error.remaining),
        f"x-ratelimit-reset-{rule.amount}": format_duration(1000 * error.retry_after),
    }
