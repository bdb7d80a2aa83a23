"""The remaining limits as reply headers in OpenAI's format.

The headers are x-ratelimit-{limit,remaining,reset}-{requests,tokens,micros}. If several limits count the same unit, the
limit with the smallest fraction left is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from emberline.gateway.limits.base import ClaimGrant
from emberline.gateway.limits.rule import LimitUnit

_HEADER_NAMES = {
    amount: tuple(f"x-ratelimit-{field}-{amount}" for field in ("limit", "remaining", "reset"))
    for amount in get_args(LimitUnit)
}


def build_rate_limit_headers(grants: Iterable[ClaimGrant]) -> dict[str, str]:
    tightest: dict[LimitUnit, ClaimGrant] = {}
    for grant in grants:
        amount = grant.claim.rule.amount
        if amount not in tightest or _fraction_left(grant) < _fraction_left(tightest[amount]):
            tightest[amount] = grant
    headers = {}
    for amount, grant in tightest.items():
        limit, left, reset = _HEADER_NAMES[amount]
        headers[limit] = str(grant.claim.rule.limit)
        headers[left] = str(max(0, grant.remaining))
        headers[reset] = format_duration(grant.resets_in_ms)
    return headers


def format_duration(ms: int) -> str:
    """Format milliseconds like OpenAI does: 1h2m3s, 59s, 120ms."""
    if ms < 1000:
        return f"{max(0, ms)}ms"
    minutes, seconds = divmod(-(-ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"


def _fraction_left(grant: ClaimGrant) -> float:
    return grant.remaining / max(1, grant.claim.rule.limit)
