"""Opens realtime sessions: messages pass unchanged between client and provider.

The usage is read from the provider's events, and is that of the request when the session has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import NotFound
from emberline.gateway.call import Attempted, Call, Reply
from emberline.gateway.costs.bill import Prices, bill
from emberline.gateway.costs.usage import Usage
from emberline.gateway.errors import Forbidden, Refused, UpstreamFailed
from emberline.gateway.keys.secrets import Secrets
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.breakers import Breakers
from emberline.gateway.providers.registry import Registry
from emberline.gateway.realtime.channel import Channel, dial
from emberline.gateway.settings import Timeouts
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.gateway.upstream.upstream import Upstream
from emberline.net.notjson import NOT_JSON

OPENED = 101  # HTTP status of an open session
AWAY = 1001  # WebSocket close code
PROTOCOLS = "sec-websocket-protocol"


class Joined(Reply, kw_only=True):
    """An open realtime session."""

    channel: Channel
    timeouts: Timeouts
    bill: Callable[[], None]  # updates the cost from the usage so far
    answered: Callable[[Usage, int], Awaitable[None]] | None = (
        None  # called with the usage and cost (in micros) of each response
    )

    async def count(self, usage: Usage) -> None:
        """Add the usage of one more response; raise LimitExceeded if a limit allows no further one."""
        before = self.micros or 0
        self.usage = usage if self.usage is None else self.usage.plus(usage)
        self.bill()
        if self.answered is not None:
            await self.answered(usage, (self.micros or 0) - before)


class Realtime:
    def __init__(
        self,
        registry: Registry,
        secrets: Secrets,
        upstream: Upstream,
        prices: Prices,
        clock: Clock,
        breakers: Breakers,
        *,
        largest: int,
    ) -> None:
        """`breakers` are shared with ordinary requests, because a provider's outage affects both."""
        self._breakers = breakers
        self._registry = registry
        self._secrets = secrets
        self._upstream = upstream
        self._prices = prices
        self._clock = clock
        self._largest = largest

    async def __call__(self, call: Call) -> Reply:
        if call.settings.guardrails:
            raise Forbidden(
                "realtime sessions are not available on a gateway with guardrails, which cannot check their messages",
                hint="use a gateway without guardrails, or send ordinary requests",
            )
        provider = self._registry.find(call.provider, call.settings)
        started_at = self._clock.now()
        try:
            key = await self._secrets.key(call, provider)
            request = self._out(call, provider, key)
            channel = await self._breakers.guard(call, provider, key, lambda _: self._opened(call, provider, request))
        except UpstreamFailed as e:
            self._tried(call, started_at, e.status if isinstance(e, Refused) else 0, e.code)
            raise
        self._tried(call, started_at, OPENED, "answered")
        return self._joined(call, channel)

    def _out(self, call: Call, provider: Provider, key: str | None) -> Outgoing:
        if not (endpoint := call.endpoint or provider.realtime):
            raise NotFound(
                f"the realtime path of provider {provider.slug!r} is unknown",
                hint="append the path to the provider's name in the URL",
            )
        headers = {name: value for name, value in call.headers.items() if name != PROTOCOLS}
        return provider.request(call.moved(endpoint=endpoint, headers=headers), key)

    async def _opened(self, call: Call, provider: Provider, request: Outgoing) -> Channel:
        seconds = call.options.request_timeout or call.settings.timeouts.first_byte
        protocols = [each.strip() for each in call.headers.get(PROTOCOLS, "").split(",") if each.strip()]
        return await dial(provider.slug, request, protocols, self._upstream, seconds=seconds, largest=self._largest)

    def _tried(self, call: Call, started_at: float, status: int, outcome: str) -> None:
        seconds, key = self._clock.now() - started_at, call.options.byok_alias or ""
        call.trail.append(Attempted(call.provider, call.model, 0, 0, status, outcome, seconds, key))

    def _joined(self, call: Call, channel: Channel) -> Joined:
        def update_bill() -> None:
            bill(call, reply, self._prices)

        async def close_websocket(reply: Reply) -> None:
            await channel.close(AWAY)  # no effect if it is already closed with another code

        timeouts = call.settings.timeouts
        reply = Joined(OPENED, {}, b"", channel=channel, timeouts=timeouts, bill=update_bill, endings=[close_websocket])
        reply.provider, reply.model, reply.first_byte = call.provider, call.model, self._clock.now() - call.began
        reply.ended = "left"  # until the session ends otherwise
        update_bill()  # for requests with a fixed price
        return reply


def named_model(first: str | bytes) -> str | None:
    """Return the model that the first message of a Gemini session names, None if it names none."""
    try:
        message = msgspec.json.decode(first)
    except NOT_JSON:
        return None
    match message:
        case {"setup": {"model": str(model)}}:
            return model.removeprefix("models/")
    return None
