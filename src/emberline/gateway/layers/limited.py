"""The layer that enforces limits: a call passes if every rule that applies to it has capacity left.

The most that a call may use is reserved first; what it did use is settled when its reply ends. A cached reply counts as
one request and costs nothing."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.core.clock import Clock
from emberline.gateway.call import Call, Handler, Layer, Reply
from emberline.gateway.costs.bill import Prices
from emberline.gateway.errors import LimitExceeded
from emberline.gateway.limits.base import Limiter
from emberline.gateway.limits.claims import Claims, Sizes
from emberline.gateway.limits.headers import duration, remaining
from emberline.gateway.limits.rule import Amount, Claim

GRACE = 5.0  # how long a reservation outlasts the deadline of its call


def limited(limiter: Limiter, sizes: Sizes, prices: Prices, clock: Clock, wall: Clock) -> Layer:
    """Return the layer that enforces limits. `clock` is monotonic; `wall` is in seconds since the epoch."""
    claim_builder = Claims(sizes, prices)

    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            claims = claim_builder.of(call)
            if not claims:
                return await inner(call)
            try:
                reservation = await limiter.reserve(claims, wall.now(), call.deadline - clock.now() + GRACE)
            except LimitExceeded as e:
                call.notes.update(_refused(claims, e))
                raise
            call.notes.update(remaining(reservation.grants))
            try:
                reply = await inner(call)
            except BaseException:
                limiter.settle(reservation, {"requests": int(call.last)})  # the last step counts the request
                raise

            async def settle_on_end(reply: Reply) -> None:
                limiter.settle(reservation, _used(reply))

            reply.endings.append(settle_on_end)
            return reply

        return handle

    return layer


def _used(reply: Reply) -> Mapping[Amount, int]:
    if reply.cached or reply.usage is None:
        return {"requests": 1, "micros": reply.micros or 0}
    return {"requests": 1, "tokens": reply.usage.total, "micros": reply.micros or 0}


def _refused(claims: list[Claim], error: LimitExceeded) -> dict[str, str]:
    rule = next(claim.rule for claim in claims if claim.rule.name == error.rule)
    return {
        f"x-ratelimit-limit-{rule.amount}": str(rule.limit),
        f"x-ratelimit-remaining-{rule.amount}": str(error.remaining),
        f"x-ratelimit-reset-{rule.amount}": duration(1000 * error.retry_after),
    }
