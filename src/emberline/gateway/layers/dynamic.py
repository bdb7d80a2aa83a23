"""DynamicRouteLayer: runs the route that a call names (`dynamic/NAME`).

Each model of the route is called as if the call had named it, so limits, guardrails, the cache and retries apply to
every model separately. When a model is not permitted or fails, the route continues at its fallback."""

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
            return inner(call) if call.provider != DYNAMIC else run_route(call)

        async def run_route(call: Call) -> Reply:
            route = self._plan(call.settings, call.model)
            session_id = call.options.session_id if not call.options.no_session_affinity else None
            results = await answers_about_body(call, route.conditions)
            traversal = Walk.begin(route, CallFacts(call), session_id or call.id, results)
            return await _Errand(self, call, traversal, inner).run()

        return handle

    def _plan(self, settings: Settings, name: str) -> Plan:
        key = (settings.account, settings.gateway)
        cached = self._plans.get(key)
        if cached is None or cached[0] is not settings:
            cached = self._plans[key] = (settings, {})
        if name not in cached[1]:
            if name not in settings.routes:
                deployed = ", ".join(sorted(settings.routes)) or "none"
                raise ModelNotFound(
                    f"route {name[:80]!r} does not exist", param="model", hint=f"deployed routes: {deployed}"
                )
            cached[1][name] = Plan.of(name, Graph.read(settings.routes[name]))
        return cached[1][name]

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
    """The progress of one call through a route: its reservations, its last reply and its last error."""

    def __init__(self, dynamic: Dynamic, call: Call, walk: Walk, inner: Handler) -> None:
        self._dynamic, self._call, self._walk, self._inner = dynamic, call, walk, inner
        self._made: list[Reservation] = []
        self._beside = Beside()
        self._answer: Reply | None = None  # of the last model that answered
        self._error: EmberlineError | None = None
        self._asked = 0

    async def run(self) -> Reply:
        try:
            while (element := self._walk.next()) is not None:
                succeeded = await (self._counted(element) if isinstance(element, RateLimit) else self._tried(element))
                if self._answer is not None and self._answer.status >= 400:
                    break  # a guardrail blocked it
                self._walk.went(succeeded)
            if self._answer is None:
                raise self._error or Broken(f"route {self._walk.plan.name!r} ended before it reached a model")
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
                raise Forbidden(f"this key or gateway does not allow {call.provider}/{call.model}"[:300])
            reply = await self._inner(call)
        except (UpstreamFailed, LimitExceeded, Forbidden, ProviderNotFound) as e:
            if isinstance(e, UpstreamFailed) and not rescuable(e, Step(call.provider, call.model)):
                raise
            self._error = e
            return False
        previous, self._answer = self._answer, reply
        if previous is not None:  # the route went on after a model that answered: only the last reply is sent
            await self._beside.drop(previous)
        return True


def at_model(call: Call, element: ModelElement, number: int, *, last: bool = True) -> Call:
    """Return the call as if it had named this model, without credentials for another provider."""
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
