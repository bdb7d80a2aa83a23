"""Opens realtime sessions, in which messages pass unchanged between client and provider.

The usage is read from the provider's messages. At the end of the session, the sum becomes the usage of the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import NotFound
from emberline.gateway.core.errors import Forbidden, ProviderErrorReply, UpstreamFailed
from emberline.gateway.core.request import GatewayReply, GatewayRequest, ProviderAttempt
from emberline.gateway.core.settings import TimeoutSettings
from emberline.gateway.costs.billing import PriceSource, set_cost
from emberline.gateway.keys.provider_keys import ProviderKeySelector
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.breakers import ProviderBreakers
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.realtime.websocket import ProviderWebSocket, open_websocket
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.usage import Usage

SWITCHING_PROTOCOLS = 101  # HTTP status of an open session
GOING_AWAY = 1001  # WebSocket close code
SUBPROTOCOL_HEADER = "sec-websocket-protocol"


class RealtimeReply(GatewayReply, kw_only=True):
    """An open realtime session."""

    websocket: ProviderWebSocket
    timeouts: TimeoutSettings
    bill: Callable[[], None]  # updates the cost from the usage so far
    on_usage: Callable[[Usage, int], Awaitable[None]] | None = None  # gets each response's usage and micro-dollars

    async def add_usage(self, usage: Usage) -> None:
        """Add the usage of one response. Raise LimitExceeded if a limit allows no further response."""
        before = self.micros or 0
        self.usage = usage if self.usage is None else self.usage.plus(usage)
        self.bill()
        if self.on_usage is not None:
            await self.on_usage(usage, (self.micros or 0) - before)


class RealtimeHandler:
    """Handles a realtime request by opening a WebSocket to its provider."""

    def __init__(
        self,
        registry: ProviderRegistry,
        key_selector: ProviderKeySelector,
        upstream: UpstreamClient,
        prices: PriceSource,
        clock: Clock,
        breakers: ProviderBreakers,
        *,
        max_message_bytes: int,
    ) -> None:
        """Create the handler.

        `breakers` are the circuit breakers that ordinary requests use, because an outage of a provider affects both.
        """
        self._breakers = breakers
        self._registry = registry
        self._secrets = key_selector
        self._upstream = upstream
        self._prices = prices
        self._clock = clock
        self._max_message_bytes = max_message_bytes

    async def __call__(self, call: GatewayRequest) -> GatewayReply:
        if call.settings.guardrails:
            raise Forbidden(
                f"gateway {call.gateway!r} has guardrails, which cannot check the messages of realtime sessions",
                hint="use a gateway without guardrails, or send ordinary requests",
            )
        provider = self._registry.find_provider(call.provider, call.settings)
        started_at = self._clock.now()
        try:
            key = await self._secrets.select_key(call, provider)
            request = self._build_request(call, provider, key)
            websocket = await self._breakers.run_with_breaker(
                call, provider, key, lambda _: self._connect(call, provider, request)
            )
        except UpstreamFailed as e:
            self._record_attempt(call, started_at, e.status if isinstance(e, ProviderErrorReply) else 0, e.code)
            raise
        self._record_attempt(call, started_at, SWITCHING_PROTOCOLS, "answered")
        return self._make_reply(call, websocket)

    def _build_request(self, call: GatewayRequest, provider: Provider, key: str | None) -> ProviderRequest:
        if not (endpoint := call.endpoint or provider.realtime_path):
            raise NotFound(
                f"provider {provider.slug!r} has no known path for realtime sessions",
                hint="append the path to the provider's name in the URL",
            )
        headers = {name: value for name, value in call.headers.items() if name != SUBPROTOCOL_HEADER}
        return provider.build_request(call.with_changes(endpoint=endpoint, headers=headers), key)

    async def _connect(self, call: GatewayRequest, provider: Provider, request: ProviderRequest) -> ProviderWebSocket:
        timeout_s = call.options.request_timeout or call.settings.timeouts.first_byte
        protocols = [each.strip() for each in call.headers.get(SUBPROTOCOL_HEADER, "").split(",") if each.strip()]
        return await open_websocket(
            provider.slug,
            request,
            protocols,
            self._upstream,
            timeout_s=timeout_s,
            max_message_bytes=self._max_message_bytes,
        )

    def _record_attempt(self, call: GatewayRequest, started_at: float, status: int, outcome: str) -> None:
        seconds, key = self._clock.now() - started_at, call.options.byok_alias or ""
        call.attempts.append(ProviderAttempt(call.provider, call.model, 0, 0, status, outcome, seconds, key))

    def _make_reply(self, call: GatewayRequest, websocket: ProviderWebSocket) -> RealtimeReply:
        def update_bill() -> None:
            set_cost(call, reply, self._prices)

        async def close_websocket(reply: GatewayReply) -> None:
            await websocket.close(GOING_AWAY)  # no effect if it is already closed with another code

        timeouts = call.settings.timeouts
        reply = RealtimeReply(
            SWITCHING_PROTOCOLS,
            {},
            b"",
            websocket=websocket,
            timeouts=timeouts,
            bill=update_bill,
            close_callbacks=[close_websocket],
        )
        reply.provider, reply.model, reply.first_byte_s = call.provider, call.model, self._clock.now() - call.started_at
        reply.ended = "left"  # until the session ends otherwise
        update_bill()  # for requests with a fixed price
        return reply


def model_from_setup(first_message: str | bytes) -> str | None:
    """Return the model named in the first message of a Gemini session, or None if the message names none."""
    try:
        message = msgspec.json.decode(first_message)
    except JSON_DECODE_ERRORS:
        return None
    match message:
        case {"setup": {"model": str(model)}}:
            return model.removeprefix("models/")
    return None
