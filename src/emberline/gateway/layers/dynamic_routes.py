"""DynamicRouteLayer: runs the dynamic route that a request names (`dynamic/NAME`).

Each model of the route is called as if the request had named it. Limits, guardrails, the cache and retries therefore
apply to each model separately. When a model is not permitted or fails, the route continues at the model's fallback.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping
from dataclasses import replace

from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, ModelNotFound
from emberline.gateway.core.errors import Forbidden, LimitExceeded, ProviderNotFound, UpstreamBroken, UpstreamFailed
from emberline.gateway.core.request import DYNAMIC, POOL, GatewayReply, GatewayRequest, Handler, RequestStep
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.costs.extra_cost import ExtraCost
from emberline.gateway.layers.fallbacks import can_fall_back
from emberline.gateway.layers.load_balancing import CostEstimator
from emberline.gateway.layers.permissions import ALLOW_MODEL_HINT, is_permitted
from emberline.gateway.layers.rate_limiting import RESERVATION_GRACE_S
from emberline.gateway.limits.base import Limiter, Reservation
from emberline.gateway.limits.claims import collect_limit_attributes
from emberline.gateway.limits.rule import LimitRule, LimitUnit
from emberline.gateway.providers.converted_request import FORWARDED_HEADERS
from emberline.gateway.routes.facts import RequestAttributes, evaluate_body_conditions
from emberline.gateway.routes.graph import ModelElement, RateLimitElement, RouteGraph
from emberline.gateway.routes.traversal import CompiledRoute, RouteTraversal


class DynamicRouteLayer:
    def __init__(self, limiter: Limiter, estimator: CostEstimator, clock: Clock, wall: Clock) -> None:
        self._limiter, self._estimator = limiter, estimator
        self._clock, self._wall = clock, wall
        self._compiled_routes: dict[tuple[str, str], tuple[GatewaySettings, dict[str, CompiledRoute]]] = {}

    def wrap(self, inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            return inner(call) if call.provider != DYNAMIC else run_route(call)

        async def run_route(call: GatewayRequest) -> GatewayReply:
            route = self._compiled_route(call.settings, call.model)
            session_id = call.options.session_id if not call.options.no_session_affinity else None
            results = await evaluate_body_conditions(call, route.conditions)
            traversal = RouteTraversal.start(route, RequestAttributes(call), session_id or call.id, results)
            return await _RouteRun(self, call, traversal, inner).run()

        return handle

    def _compiled_route(self, settings: GatewaySettings, name: str) -> CompiledRoute:
        key = (settings.account, settings.gateway)
        cached = self._compiled_routes.get(key)
        if cached is None or cached[0] is not settings:
            cached = self._compiled_routes[key] = (settings, {})
        if name not in cached[1]:
            if name not in settings.routes:
                deployed = ", ".join(sorted(settings.routes)) or "none"
                raise ModelNotFound(
                    f"dynamic route {name[:80]!r} does not exist", param="model", hint=f"deployed routes: {deployed}"
                )
            cached[1][name] = CompiledRoute.compile(name, RouteGraph.parse(settings.routes[name]))
        return cached[1][name]

    async def reserve_quota(
        self, call: GatewayRequest, traversal: RouteTraversal, element: RateLimitElement
    ) -> Reservation:
        rule = make_quota_rule(traversal.route.name, element)
        amount = 1
        if rule.amount == "micros" and (model := traversal.expected_model()) is not None:
            amount = max(1, self._estimator.max_cost(call_for_model(call, model, 0)) or 1)
        claim = rule.make_claim(collect_limit_attributes(call), amount)
        return await self._limiter.reserve(
            [claim], self._wall.now(), call.deadline - self._clock.now() + RESERVATION_GRACE_S
        )

    def settle_reservations(self, reservations: list[Reservation], used: Mapping[LimitUnit, int]) -> None:
        for reservation in reservations:
            self._limiter.settle(reservation, used)
        reservations.clear()


class _RouteRun:
    """The state of one request in a dynamic route: quota reservations, last reply and last error."""

    def __init__(
        self, layer: DynamicRouteLayer, call: GatewayRequest, traversal: RouteTraversal, inner: Handler
    ) -> None:
        self._layer, self._call, self._traversal, self._inner = layer, call, traversal, inner
        self._reservations: list[Reservation] = []
        self._extra_cost = ExtraCost()
        self._reply: GatewayReply | None = None  # of the last model that answered
        self._last_error: EmberlineError | None = None
        self._models_tried = 0

    async def run(self) -> GatewayReply:
        try:
            while (element := self._traversal.next_action()) is not None:
                succeeded = await (
                    self._try_rate_limit(element) if isinstance(element, RateLimitElement) else self._try_model(element)
                )
                if self._reply is not None and self._reply.status >= 400:
                    break  # a guardrail blocked it
                self._traversal.advance(succeeded)
            if self._reply is None:
                raise self._last_error or UpstreamBroken(
                    f"route {self._traversal.route.name!r} ended before it reached a model"
                )
        except BaseException:
            self._layer.settle_reservations(self._reservations, {"requests": 1})
            if self._reply is not None:
                await self._reply.close()
            raise
        self._reply.close_callbacks += [self._extra_cost.add_to_reply, self._settle_on_end]
        return self._reply

    async def _settle_on_end(self, reply: GatewayReply) -> None:
        self._layer.settle_reservations(self._reservations, {"requests": 1, "micros": reply.micros or 0})

    async def _try_rate_limit(self, element: RateLimitElement) -> bool:
        try:
            self._reservations.append(await self._layer.reserve_quota(self._call, self._traversal, element))
        except LimitExceeded as e:
            self._last_error = e
            return False
        return True

    async def _try_model(self, element: ModelElement) -> bool:
        call = call_for_model(self._call, element, self._models_tried, is_last=not self._traversal.has_fallback)
        self._models_tried += 1
        try:
            call.access_granted = is_permitted(call, DYNAMIC, self._traversal.route.name)
            if not call.access_granted and call.provider != POOL and not is_permitted(call, call.provider, call.model):
                raise Forbidden(
                    f"model {call.provider}/{call.model} is not allowed for this key or gateway"[:300],
                    hint=ALLOW_MODEL_HINT,
                )
            reply = await self._inner(call)
        except (UpstreamFailed, LimitExceeded, Forbidden, ProviderNotFound) as e:
            if isinstance(e, UpstreamFailed) and not can_fall_back(e, RequestStep(call.provider, call.model)):
                raise
            self._last_error = e
            return False
        previous, self._reply = self._reply, reply
        if previous is not None:  # the route went on after a model that answered: only the last reply is sent
            await self._extra_cost.discard_reply(previous)
        return True


def call_for_model(
    call: GatewayRequest, element: ModelElement, step_number: int, *, is_last: bool = True
) -> GatewayRequest:
    """Return the request as if it had named this model, without the credentials of a different provider."""
    target = element.properties
    options = replace(call.options, max_attempts=target.retries + 1)
    if target.timeout is not None:
        options = replace(options, request_timeout=target.timeout / 1e3, timeout_configured=True)
    return call.with_changes(
        provider=target.provider,
        model=target.model,
        headers={name: value for name, value in call.headers.items() if name in FORWARDED_HEADERS},
        options=options,
        steps=(RequestStep(target.provider, target.model),),
        step_index=step_number,
        is_last_step=is_last,
    )


def make_quota_rule(route: str, element: RateLimitElement) -> LimitRule:
    quota = element.properties
    name = f"{route}/{element.id}"
    return LimitRule(
        name=name if len(name) <= 64 else hashlib.sha256(name.encode()).hexdigest(),
        limit=round(quota.limit * 1_000_000) if quota.limit_type == "cost" else int(quota.limit),
        amount="micros" if quota.limit_type == "cost" else "requests",
        per=quota.interval,
        technique=quota.technique,
        split=(quota.key,) if quota.key else (),
    )
