"""Dynamic: a layer that walks the route a call names (`dynamic/NAME`). Each model of it is asked as if the call had
named it, so limits, guardrails, the cache and retries hold for every one by itself; what it may not or cannot do is
tried at the next."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping
from dataclasses import replace

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, ModelNotFound
from emberline.gateway.call import DYNAMIC, POOL, Call, Handler, Reply, Step
from emberline.gateway.costs.beside import Beside
from emberline.gateway.errors import Broken, Forbidden, LimitExceeded, ProviderNotFound, UpstreamFailed
from emberline.gateway.layers.balanced import Estimate
from emberline.gateway.layers.limited import GRACE
from emberline.gateway.layers.permitted import permits
from emberline.gateway.layers.routed import rescuable
from emberline.gateway.limits.base import Limiter, Reservation
from emberline.gateway.limits.claims import facts_of
from emberline.gateway.limits.rule import Amount, Rule
from emberline.gateway.providers.wire import SHARED
from emberline.gateway.routes.facts import CallFacts, answers_about_body
from emberline.gateway.routes.graph import Graph, ModelElement, RateLimit
from emberline.gateway.routes.walk import Plan, Walk
from emberline.gateway.settings import Settings


class Dynamic:
    def __init__(self, limiter: Limiter, estimate: Estimate, clock: Clock, wall: Clock) -> None:
        self._limiter, self._estimate = limiter, estimate
        self._clock, self._wall = clock, wall
        self._plans: dict[tuple[str, str], tuple[Settings, dict[str, Plan]]] = {}

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            return inner(call) if call.provider != DYNAMIC else walked(call)

        async def walked(call: Call) -> Reply:
            plan = self._plan(call.settings, call.model)
            affine = call.options.session_id if not call.options.no_session_affinity else None
            answers = await answers_about_body(call, plan.conditions)
            walk = Walk.begin(plan, CallFacts(call), affine or call.id, answers)
            return await _Errand(self, call, walk, inner).run()

        return handle

    def _plan(self, settings: Settings, name: str) -> Plan:
        place = (settings.account, settings.gateway)
        known = self._plans.get(place)
        if known is None or known[0] is not settings:
            known = self._plans[place] = (settings, {})
        if name not in known[1]:
            if name not in settings.routes:
                there = ", ".join(sorted(settings.routes)) or "none"
                raise ModelNotFound(f"there is no route {name[:80]!r}", param="model", hint=f"deployed are: {there}")
            known[1][name] = Plan.of(name, Graph.read(settings.routes[name]))
        return known[1][name]

    async def reserve(self, call: Call, walk: Walk, element: RateLimit) -> Reservation:
        rule = rule_of(walk.plan.name, element)
        amount = 1
        if rule.amount == "micros" and (model := walk.likely()) is not None:
            amount = max(1, self._estimate.at_most(at_model(call, model, 0)) or 1)
        claim = rule.claim(facts_of(call), amount)
        return await self._limiter.reserve([claim], self._wall.now(), call.deadline - self._clock.now() + GRACE)

    def settle(self, made: list[Reservation], used: Mapping[Amount, int]) -> None:
        for reservation in made:
            self._limiter.settle(reservation, used)
        made.clear()


class _Errand:
    """One call on its way."""

    def __init__(self, dynamic: Dynamic, call: Call, walk: Walk, inner: Handler) -> None:
        self._dynamic, self._call, self._walk, self._inner = dynamic, call, walk, inner
        self._made: list[Reservation] = []
        self._beside = Beside()
        self._answer: Reply | None = None  # the last good one
        self._error: EmberlineError | None = None  # the last
        self._asked = 0  # models

    async def run(self) -> Reply:
        try:
            while (asking := self._walk.next()) is not None:
                well = await (self._counted(asking) if isinstance(asking, RateLimit) else self._tried(asking))
                if self._answer is not None and self._answer.status >= 400:
                    break  # refused for what it says
                self._walk.went(well)
            if self._answer is None:
                raise self._error or Broken(f"route {self._walk.plan.name!r} came to its end without a model")
        except BaseException:
            self._dynamic.settle(self._made, {"requests": 1})
            if self._answer is not None:
                await self._answer.close()
            raise
        self._answer.endings += [self._beside.add, self._ended]
        return self._answer

    async def _ended(self, reply: Reply) -> None:
        self._dynamic.settle(self._made, {"requests": 1, "micros": reply.micros or 0})

    async def _counted(self, element: RateLimit) -> bool:
        try:
            self._made.append(await self._dynamic.reserve(self._call, self._walk, element))
        except LimitExceeded as e:
            self._error = e
            return False
        return True

    async def _tried(self, element: ModelElement) -> bool:
        call = at_model(self._call, element, self._asked, last=not self._walk.rescued)
        self._asked += 1
        try:
            call.cleared = permits(call, DYNAMIC, self._walk.plan.name)
            if not call.cleared and call.provider != POOL and not permits(call, call.provider, call.model):
                raise Forbidden(f"{call.provider}/{call.model} is not allowed here"[:300])
            reply = await self._inner(call)
        except (UpstreamFailed, LimitExceeded, Forbidden, ProviderNotFound) as e:
            if isinstance(e, UpstreamFailed) and not rescuable(e, Step(call.provider, call.model)):
                raise
            self._error = e
            return False
        before, self._answer = self._answer, reply
        if before is not None:  # another model is asked after one that answered: only the last one is sent
            await self._beside.drop(before)
        return True


def at_model(call: Call, element: ModelElement, number: int, *, last: bool = True) -> Call:
    """The call as if it had named this model. A provider's credentials are none of another's business."""
    target = element.properties
    options = replace(call.options, max_attempts=target.retries + 1)
    if target.timeout is not None:
        options = replace(options, request_timeout=target.timeout / 1e3, timeout_configured=True)
    return call.moved(
        provider=target.provider,
        model=target.model,
        headers={name: value for name, value in call.headers.items() if name in SHARED},
        options=options,
        steps=(Step(target.provider, target.model),),
        step=number,
        last=last,
    )


def rule_of(route: str, element: RateLimit) -> Rule:
    quota = element.properties
    name = f"{route}/{element.id}"
    return Rule(
        name=name if len(name) <= 64 else hashlib.sha256(name.encode()).hexdigest(),
        limit=round(quota.limit * 1_000_000) if quota.limit_type == "cost" else int(quota.limit),
        amount="micros" if quota.limit_type == "cost" else "requests",
        per=quota.interval,
        technique=quota.technique,
        split=(quota.key,) if quota.key else (),
    )
