"""RetryHandler: the innermost handler. It sends one step of a call to its provider and retries failures.

A reply is returned only once it is certain to begin: a whole reply that passed its checks, or a stream that has
delivered its first content."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

from emberline.core.clock import Clock
from emberline.core.errors import DeadlineExceeded
from emberline.core.offload import LARGE, offload
from emberline.gateway.call import Attempted, Call, Reply
from emberline.gateway.costs.bill import Prices, bill
from emberline.gateway.errors import Broken, Refused, UpstreamFailed
from emberline.gateway.keys.secrets import Secrets
from emberline.gateway.providers.base import CHANGED, HELD, Provider
from emberline.gateway.providers.breakers import Breakers
from emberline.gateway.providers.registry import Registry
from emberline.gateway.providers.wire import Wire, safe_header, wired, wired_apart
from emberline.gateway.refusal import refused
from emberline.gateway.streams.eventmeter import EventStreamMeter
from emberline.gateway.streams.meter import Meter, RawMeter, check_whole
from emberline.gateway.streams.passage import Passage
from emberline.gateway.upstream.upstream import Incoming, Upstream

LARGEST = 64 << 20  # bytes of a reply that is not streamed
LARGEST_ERROR = 1 << 20  # bytes of an error reply
ERROR_TIME = 10.0  # seconds to read the body of an error reply
PATIENCE = 2.0  # seconds: with a longer Retry-After the next step is tried instead, if there is one
EVENTS = "text/event-stream"
_NOT_OURS = HELD | {"content-encoding", "set-cookie", "server", "date", "alt-svc", "strict-transport-security"}


def _in_pieces(call: Call, incoming: Incoming) -> bool:
    """Return whether the reply is passed on in chunks, as one of an unknown dialect that is not JSON is."""
    return call.stream or (call.dialect == "raw" and incoming.kind != "application/json")


class Attempts:
    def __init__(
        self,
        registry: Registry,
        secrets: Secrets,
        upstream: Upstream,
        prices: Prices,
        clock: Clock,
        wall: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._secrets = secrets
        self._upstream = upstream
        self._prices = prices
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self.breakers = Breakers(clock)

    async def __call__(self, call: Call) -> Reply:
        provider = self._registry.find(call.provider, call.settings)
        key = await self._secrets.key(call, provider)
        max_output = self._prices.max_output(call.provider, call.model)
        call.notes.pop(CHANGED, None)  # an earlier step may have set it
        wiring = (call, provider, key, max_output, int(self._wall.now()))
        wire = wired(*wiring) if len(call.body) < LARGE else await wired_apart(*wiring)
        if CHANGED in call.notes:
            call.notes[CHANGED] = safe_header(call.notes[CHANGED])
        attempts = call.options.max_attempts or call.settings.retries.attempts
        for attempt in range(attempts):
            started_at = self._clock.now()
            try:
                reply = await self.breakers.guard(call, provider, key, partial(self._try, call, provider, wire))
            except UpstreamFailed as e:
                e.provider = provider.slug
                self._tried(call, attempt, started_at, e.status if isinstance(e, Refused) else 0, e.code)
                if attempt + 1 == attempts or (delay := self._pause(call, attempt, e)) is None:
                    raise
                await self._sleep(delay)
            else:
                self._tried(call, attempt, started_at, reply.status, "answered")
                return reply
        raise AssertionError("unreachable")

    def _tried(self, call: Call, attempt: int, began: float, status: int, outcome: str) -> None:
        seconds = self._clock.now() - began
        key = call.options.byok_alias or ""
        call.trail.append(Attempted(call.provider, call.model, call.step, attempt, status, outcome, seconds, key))

    def _pause(self, call: Call, attempt: int, error: UpstreamFailed) -> float | None:
        """Return the seconds until the next attempt, or None if there is to be none."""
        if not error.retryable:
            return None
        retries = call.settings.retries
        base = retries.delay if call.options.retry_delay is None else call.options.retry_delay
        factor = {"constant": 1, "linear": attempt + 1, "exponential": 2**attempt}[
            call.options.backoff or retries.backoff
        ]
        # Jitter: calls that failed together must not retry together.
        delay = base * factor * random.uniform(0.8, 1.2)
        if isinstance(error, Refused) and error.retry_after is not None:
            if error.retry_after > PATIENCE and not call.last:
                return None
            delay = max(delay, error.retry_after)
        return delay if self._clock.now() + delay < call.deadline else None

    async def _try(self, call: Call, provider: Provider, wire: Wire, failed: Callable[[], None]) -> Reply:
        now = self._clock.now()
        left = call.deadline - now
        if left <= 0:
            raise DeadlineExceeded(f"the provider did not reply within {call.settings.timeouts.total:.3g} s")
        first = call.options.request_timeout or (call.settings.timeouts.first_byte if call.stream else left)
        incoming = await provider.ask(wire.out, self._upstream, min(first, left), self._wall.now())
        try:
            if incoming.status >= 400:
                body = await incoming.whole(min(left, ERROR_TIME), LARGEST_ERROR)
                is_own_error = call.plain and (provider.own_errors or wire.out.decoder is not None)
                error_dialect = "raw" if is_own_error else wire.dialect
                raise refused(call.provider, incoming.status, incoming.headers, body, error_dialect)
            if 300 <= incoming.status < 400:
                raise Broken(f"the provider answered {incoming.status}; redirects are not followed")
            if _in_pieces(call, incoming):
                return await self._stream(call, wire, incoming, now + first, failed)
            return await self._whole(call, wire, incoming)
        except BaseException:
            incoming.close()
            raise

    async def _whole(self, call: Call, wire: Wire, incoming: Incoming) -> Reply:
        if wire.dialect != "raw" and incoming.kind != "application/json":
            raise Broken(f"the provider's reply has content type {incoming.kind or '(none)'}, not application/json")
        left = call.deadline - self._clock.now()
        body = await incoming.whole(min(max(left, 0.0), call.settings.timeouts.between_events), LARGEST)
        if len(body) < LARGE:
            usage, model = check_whole(wire.dialect, body)
            incoming.close()
            translated, lost = wire.whole(body)
        else:
            usage, model = await offload.run(len(body), check_whole, wire.dialect, body)
            incoming.close()
            translated, lost = await wire.whole_apart(body)
        reply = self._reply(call, incoming, translated)
        if lost:
            call.notes[CHANGED] = safe_header(", ".join(filter(None, (call.notes.get(CHANGED), lost))))
        reply.usage, reply.model = usage, model or call.model
        reply.ended = "complete"
        bill(call, reply, self._prices)
        return reply

    async def _stream(
        self, call: Call, wire: Wire, incoming: Incoming, until: float, failed: Callable[[], None]
    ) -> Reply:
        if incoming.kind == EVENTS:
            meter: Meter = Meter(wire.dialect, hide_usage=wire.hide_usage)
        elif wire.dialect == "raw":
            meter = EventStreamMeter() if incoming.kind == EventStreamMeter.kind else RawMeter()
        else:
            raise Broken(f"the provider's reply has content type {incoming.kind or '(none)'}, not {EVENTS}")
        passage = Passage(call, incoming, meter, wire.translator(), self._clock)

        def settle(passage: Passage, how: str, code: str) -> None:
            reply.ended, reply.error = how, code
            tokens = call.surveyed.tokens if call.surveyed is not None else None
            reply.usage, reply.estimated = passage.meter.usage(call.body, tokens)
            bill(call, reply, self._prices)
            if how == "cut" and self._clock.now() < call.deadline:  # a slow reader can reach the deadline as well
                failed()

        await passage.begin(until, settle)
        reply = self._reply(call, incoming, passage)
        reply.model = meter.signs.model or call.model
        return reply

    def _reply(self, call: Call, incoming: Incoming, body: bytes | Passage) -> Reply:
        headers = {name: value for name, value in incoming.headers.items() if name not in _NOT_OURS}
        reply = Reply(incoming.status, headers, body, provider=call.provider, step=call.step)
        reply.first_byte = self._clock.now() - call.began
        return reply
