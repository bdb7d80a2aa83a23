"""The layer that replaces a pool by a list of steps, the selected member first.

It also records how the members of the pool perform."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from emberline.core.clock import Clock
from emberline.core.errors import ModelNotFound
from emberline.gateway.call import POOL, Call, Handler, Layer, Reply, Step
from emberline.gateway.errors import Forbidden
from emberline.gateway.layers.cached import lifetime
from emberline.gateway.layers.hedge import OUTRUN
from emberline.gateway.layers.permitted import permits
from emberline.gateway.providers.breakers import is_cut_short
from emberline.gateway.providers.wire import SHARED
from emberline.gateway.routes.balance import Balance
from emberline.gateway.routes.pool import Member

REQUEST_FAULTS = ("content_filter", "context_length_exceeded")  # the request caused them, whatever their status


class Estimate(Protocol):
    def at_most(self, call: Call) -> int | None:
        """Return the most micro-dollars that the call may cost, or None if the price is unknown."""
        ...


def balanced(estimate: Estimate, clock: Clock) -> Layer:
    """Return the layer that selects pool members.

    Statistics are kept per gateway: one tenant's failures do not move another's calls.
    """
    balancers: dict[tuple[str, str], Balance] = {}

    def layer(inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            return inner(call) if call.provider != POOL else handle_pool(call)

        async def handle_pool(call: Call) -> Reply:
            balancer = balancers.setdefault((call.account, call.gateway), Balance())
            resolved = _chosen(call, balancer, estimate, clock.now())
            first_attempt = len(call.trail)
            try:
                return await inner(resolved)
            finally:
                for attempt in call.trail[first_attempt:]:
                    member_key = (attempt.provider, attempt.model, attempt.key)
                    if attempt.outcome in ("answered", OUTRUN):  # a cancelled hedge took at least this long
                        balancer.answered(member_key, attempt.seconds, stream=call.stream)
                    elif not is_cut_short(call, attempt.outcome) and attempt.outcome not in REQUEST_FAULTS:
                        balancer.failed(member_key, attempt.status, clock.now())

        return handle

    return layer


def _chosen(call: Call, balance: Balance, estimate: Estimate, now: float) -> Call:
    pool = call.settings.pools.get(call.model)
    if pool is None:
        raise ModelNotFound(
            f"pool {call.model[:80]!r} does not exist",
            param="model",
            hint=f"pools of this gateway: {', '.join(sorted(call.settings.pools)) or 'none'}",
        )
    may_use_all = call.cleared or permits(call, POOL, call.model)
    members = [each for each in pool.members if may_use_all or permits(call, each.provider, each.model)]
    if not members:
        raise Forbidden(f"this key or gateway allows no member of pool {call.model!r}"[:300])
    costs = [_cost(call, each, estimate) if pool.choose == "cheapest" else None for each in members]
    draw = random.Random(_seed(call)).random
    order = balance.order(pool, members, costs, draw, stream=call.stream, now=now)
    steps = tuple(_step(call, member) for member in order)
    return call.moved(
        provider=order[0].provider,
        model=order[0].model,
        headers={name: value for name, value in call.headers.items() if name in SHARED},
        options=steps[0].options,
        steps=steps,
        hedge=balance.slow(order[0], call.stream) if pool.hedge and len(order) > 1 else None,
    )


def _step(call: Call, member: Member) -> Step:
    alias = member.key or call.options.byok_alias
    return Step(member.provider, member.model, options=replace(call.options, byok_alias=alias))


def _cost(call: Call, member: Member, estimate: Estimate) -> int | None:
    return estimate.at_most(call.moved(provider=member.provider, model=member.model))


def _seed(call: Call) -> str:
    """Return an equal seed for calls of one session, and for equal calls that may share a cached reply."""
    if call.options.session_id is not None and not call.options.no_session_affinity:
        return call.options.session_id
    if not lifetime(call):
        return call.id
    return hashlib.sha256(call.body).hexdigest() if call.surveyed is None else call.surveyed.canonical.hex()
