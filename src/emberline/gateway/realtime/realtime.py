"""Realtime: a provider's own socket, opened for a call. What is said there passes as it is; what it used is told by the
provider's events, and is the call's when the session has ended."""

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

OPENED = 101  # the status of a session
AWAY = 1001  # the code of a socket whose other side is gone
PROTOCOLS = "sec-websocket-protocol"  # the header in which a call has those that its client offers


class Joined(Reply, kw_only=True):
    """An open session."""

    channel: Channel
    timeouts: Timeouts
    bill: Callable[[], None]  # for what was used by now
    answered: Callable[[Usage, int], Awaitable[None]] | None = None  # one more, that used and cost so much

    async def count(self, usage: Usage) -> None:
        """Of one more answer. LimitExceeded: there can be no other."""
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
        """`breakers`: those of calls that are no sessions, whose trouble is the same. `largest`: bytes of a message."""
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
                "this gateway has guardrails, and they cannot look into a realtime socket",
                hint="use another gateway for it, or a request of its own for every turn",
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
            raise NotFound(f"where {provider.slug} has a realtime socket is not known", hint="write its path after it")
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
            await channel.close(AWAY)  # if nobody has, with a better reason

        timeouts = call.settings.timeouts
        reply = Joined(OPENED, {}, b"", channel=channel, timeouts=timeouts, bill=update_bill, endings=[close_websocket])
        reply.provider, reply.model, reply.first_byte = call.provider, call.model, self._clock.now() - call.began
        reply.ended = "left"  # until it is known better
        update_bill()  # where the whole has a price
        return reply


def named_model(first: str | bytes) -> str | None:
    """Of a session of Gemini's, whose first message says it; None: it does not."""
    try:
        message = msgspec.json.decode(first)
    except NOT_JSON:
        return None
    match message:
        case {"setup": {"model": str(model)}}:
            return model.removeprefix("models/")
    return None
