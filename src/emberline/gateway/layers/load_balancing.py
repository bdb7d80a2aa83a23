"""The layer that replaces a pool by a list of steps (pairs of provider and model to try in order).

The first step is the selected pool member. The layer also records the latency and the failures of pool members.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from emberline.core.clock import Clock
from emberline.core.errors import ModelNotFound
from emberline.gateway.core.errors import Forbidden
from emberline.gateway.core.pool import PoolMember
from emberline.gateway.core.request import POOL, GatewayReply, GatewayRequest, Handler, Layer, RequestStep
from emberline.gateway.layers.caching import cache_ttl_s
from emberline.gateway.layers.hedging import HEDGE_LOST
from emberline.gateway.layers.permissions import ALLOW_MODEL_HINT, is_permitted
from emberline.gateway.providers.breakers import is_caller_timeout
from emberline.gateway.providers.converted_request import FORWARDED_HEADERS
from emberline.gateway.routes.load_balancer import LoadBalancer

REQUEST_ERROR_CODES = ("content_filter", "context_length_exceeded")  # the request caused them, whatever their status


class CostEstimator(Protocol):
    def max_cost(self, call: GatewayRequest) -> int | None:
        """Return the highest possible cost of the request in micro-dollars, or None if the price is unknown."""
        ...


def balance_pools(estimator: CostEstimator, clock: Clock) -> Layer:
    """Return the layer that selects pool members.

    Statistics are kept per gateway, so that failures of one tenant's requests do not affect other tenants.
    """
    balancers: dict[tuple[str, str], LoadBalancer] = {}

    def layer(inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            return inner(call) if call.provider != POOL else handle_pool(call)

        async def handle_pool(call: GatewayRequest) -> GatewayReply:
            balancer = balancers.setdefault((call.account, call.gateway), LoadBalancer())
            resolved = _resolve_pool(call, balancer, estimator, clock.now())
            first_attempt = len(call.attempts)
            try:
                return await inner(resolved)
            finally:
                for attempt in call.attempts[first_attempt:]:
                    member_key = (attempt.provider, attempt.model, attempt.key)
                    if attempt.outcome in ("answered", HEDGE_LOST):  # a cancelled hedge took at least this long
                        balancer.record_success(member_key, attempt.seconds, is_streamed=call.stream)
                    elif not is_caller_timeout(call, attempt.outcome) and attempt.outcome not in REQUEST_ERROR_CODES:
                        balancer.record_failure(member_key, attempt.status, clock.now())

        return handle

    return layer


def _resolve_pool(call: GatewayRequest, balancer: LoadBalancer, estimator: CostEstimator, now: float) -> GatewayRequest:
    pool = call.settings.pools.get(call.model)
    if pool is None:
        raise ModelNotFound(
            f"pool {call.model[:80]!r} does not exist",
            param="model",
            hint=f"pools of this gateway: {', '.join(sorted(call.settings.pools)) or 'none'}",
        )
    may_use_all = call.access_granted or is_permitted(call, POOL, call.model)
    members = [each for each in pool.members if may_use_all or is_permitted(call, each.provider, each.model)]
    if not members:
        raise Forbidden(
            f"no member of pool {call.model[:80]!r} is allowed for this key or gateway", hint=ALLOW_MODEL_HINT
        )
    costs = [_estimate_member_cost(call, each, estimator) if pool.choose == "cheapest" else None for each in members]
    draw = random.Random(_affinity_seed(call)).random
    order = balancer.order_members(pool, members, costs, draw, is_streamed=call.stream, now=now)
    steps = tuple(_make_member_step(call, member) for member in order)
    return call.with_changes(
        provider=order[0].provider,
        model=order[0].model,
        headers={name: value for name, value in call.headers.items() if name in FORWARDED_HEADERS},
        options=steps[0].options or call.options,
        steps=steps,
        hedge_delay_s=balancer.hedge_delay_s(order[0], call.stream) if pool.hedge and len(order) > 1 else None,
    )


def _make_member_step(call: GatewayRequest, member: PoolMember) -> RequestStep:
    alias = member.key or call.options.byok_alias
    return RequestStep(member.provider, member.model, options=replace(call.options, byok_alias=alias))


def _estimate_member_cost(call: GatewayRequest, member: PoolMember, estimator: CostEstimator) -> int | None:
    return estimator.max_cost(call.with_changes(provider=member.provider, model=member.model))


def _affinity_seed(call: GatewayRequest) -> str:
    """Return the seed of the random numbers that order the members of a pool.

    All requests of a session have the same seed. Outside of sessions, equal requests have the same seed if their
    replies may be cached. Every other request has a seed of its own.
    """
    if call.options.session_id is not None and not call.options.no_session_affinity:
        return call.options.session_id
    if not cache_ttl_s(call):
        return call.id
    return (
        hashlib.sha256(call.body).hexdigest() if call.body_summary is None else call.body_summary.canonical_digest.hex()
    )
