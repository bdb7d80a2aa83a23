"""Limited: a call passes when every rule that holds for it has room. What it may use is reserved first; what it did use
is settled when its reply has ended. A reply from the cache counts as a request, and costs nothing."""

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

GRACE = 5.0  # seconds a reservation outlasts the call's deadline


def limited(limiter: Limiter, sizes: Sizes, prices: Prices, clock: Clock, wall: Clock) -> Layer:
    """`clock` is monotonic, `wall` tells seconds since 1970."""
    claimed = Claims(sizes, prices)

    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            claims = claimed.of(call)
            if not claims:
                return await inner(call)
            try:
                made = await limiter.reserve(claims, wall.now(), call.deadline - clock.now() + GRACE)
            except LimitExceeded as e:
                call.notes.update(_refused(claims, e))
                raise
            call.notes.update(remaining(made.grants))
            try:
                reply = await inner(call)
            except BaseException:
                limiter.settle(made, {"requests": int(call.last)})  # else it is the next step's to count
                raise

            async def ended(reply: Reply) -> None:
                limiter.settle(made, _used(reply))

            reply.endings.append(ended)
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
