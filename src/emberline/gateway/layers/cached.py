"""CacheLayer: answers a repeated call from the cache. Only complete, successful replies are stored.

Of equal calls that arrive together one is sent and the others wait for its reply. If it fails, each of them is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emberline.core.clock import Clock
from emberline.gateway.cache.base import LARGEST, CacheStore
from emberline.gateway.cache.entry import Entry, Recording
from emberline.gateway.cache.flights import Flights, Landing
from emberline.gateway.cache.key import cache_key
from emberline.gateway.call import Call, Handler, Reply

if TYPE_CHECKING:
    from emberline.gateway.cache.semantic import Look, Semantic  # imports numpy, which most gateways do not need

CUSTOM_TTL = 300  # for a call with its own cache key and no TTL
WAIT = 30.0  # seconds that a call waits for the reply of an equal call


@dataclass(slots=True)
class CacheStats:
    hits: int = 0
    misses: int = 0
    shared: int = 0  # hits that waited for a call in flight
    stored: int = 0
    too_large: int = 0


@dataclass(frozen=True, slots=True)
class _Ask:
    call: Call
    key: str
    seconds: int


class Cached:
    def __init__(
        self,
        store: CacheStore,
        clock: Clock,
        semantic: Callable[[], Semantic] | None = None,
        *,
        wait: float = WAIT,
        largest: int = LARGEST,
    ) -> None:
        """`make_semantic` is called when a gateway first uses the semantic cache."""
        self._store, self._clock, self._make = store, clock, semantic
        self._wait, self._largest = wait, largest
        self.semantic: Semantic | None = None
        self._flights = Flights()
        self.stats = CacheStats()

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            ttl_s = lifetime(call)
            return find_or_forward(_Ask(call, cache_key(call), ttl_s)) if ttl_s else inner(call)

        async def find_or_forward(lookup: _Ask) -> Reply:
            return await self._known(lookup) or await self._asked(lookup, inner)

        return handle

    async def _known(self, ask: _Ask) -> Reply | None:
        """Return the cached reply, or None if the call must be sent. Waits for an equal call in flight."""
        deadline = min(self._clock.now() + self._wait, ask.call.deadline)
        waited = False
        while True:
            if (found := await self._found(ask)) is not None:
                self.stats.hits += 1
                self.stats.shared += waited
                return found
            flight = self._flights.running(ask.key)
            if flight is None:
                return None
            outcome = await self._flights.wait(flight, deadline - self._clock.now())
            if outcome in (None, "failed"):
                return None
            waited = True

    async def _found(self, ask: _Ask) -> Reply | None:
        entry = await self._entry(ask.key)
        return entry.reply() if entry is not None else None

    async def _entry(self, key: str) -> Entry | None:
        data = await self._store.get(key)
        return Entry.decoded(data) if data is not None else None

    async def _asked(self, ask: _Ask, inner: Handler) -> Reply:
        first = self._flights.running(ask.key) is None  # otherwise that one failed or is too slow: send this one too
        flight = self._flights.begin(ask.key) if first else None
        try:
            semantic_lookup = await self._look(ask.call)
            if semantic_lookup is not None and (similar := await self._meant(ask, semantic_lookup)) is not None:
                self._land(ask, flight, "stored")
                return similar
            self.stats.misses += 1
            reply = await inner(ask.call)
        except BaseException as e:
            self._land(ask, flight, "left" if isinstance(e, asyncio.CancelledError) else "failed")
            raise
        if reply.status != 200 or reply.error:
            self._land(ask, flight, "failed")
            return reply
        # The body is captured now, because outer layers may replace it before the reply ends.
        body = reply.body if isinstance(reply.body, bytes) else Recording(reply.body, self._largest)
        reply.body = body

        async def store_on_end(reply: Reply) -> None:
            outcome: Landing = "left" if reply.ended == "left" else "failed"
            entry = None
            try:
                if reply.ended == "complete" and reply.status == 200:
                    entry = await self._stored(ask, reply, body)
                    outcome = "failed" if entry is None else "stored"
            finally:
                self._land(ask, flight, outcome)
            if entry is not None and semantic_lookup is not None:
                await self._learn(ask, semantic_lookup, entry)

        reply.endings.append(store_on_end)
        return reply

    async def _look(self, call: Call) -> Look | None:
        if self._make is None or call.settings.semantic.mode == "off":
            return None
        if self.semantic is None:
            self.semantic = self._make()
        return await self.semantic.look(call)

    async def _meant(self, ask: _Ask, look: Look) -> Reply | None:
        """Return the cached reply to a similar question, and store it under this call's key as well."""
        assert self.semantic is not None
        if look.near is None or ask.call.settings.semantic.mode != "on":
            return None
        entry = await self._entry(look.near.key)
        if entry is None:
            return None
        await self._store.put(ask.key, entry.encoded(), look.near.expires - self._clock.now())
        self.semantic.stats.served += 1
        reply = entry.reply()
        reply.headers["x-emberline-cache"] = f"semantic; similarity={look.near.similarity:.4f}"
        return reply

    async def _learn(self, ask: _Ask, look: Look, entry: Entry) -> None:
        assert self.semantic is not None
        self.semantic.learn(look, ask.key, ask.seconds)
        if look.near is not None and (similar := await self._entry(look.near.key)) is not None:
            await self.semantic.compare(similar, entry)

    async def _stored(self, ask: _Ask, reply: Reply, kept: bytes | Recording) -> Entry | None:
        if isinstance(kept, bytes):
            is_complete, chunks = len(kept) <= self._largest, [kept]
        else:
            is_complete, chunks = kept.whole, kept.chunks
        if not is_complete:
            self.stats.too_large += 1
            return None
        entry = Entry.of(reply, chunks, isinstance(kept, Recording))
        await self._store.put(ask.key, entry.encoded(), ask.seconds)
        self.stats.stored += 1
        return entry

    def _land(self, ask: _Ask, flight: asyncio.Future[Landing] | None, how: Landing) -> None:
        if flight is not None:
            self._flights.land(ask.key, flight, how)


def lifetime(call: Call) -> int:
    """Return how many seconds the reply is cached; 0 if the call neither uses nor fills the cache."""
    options = call.options
    private = call.settings.zdr if options.zdr is None else options.zdr
    if options.skip_cache or private or call.method != "POST":
        return 0
    if options.cache_ttl is not None:
        return options.cache_ttl
    return call.settings.cache_ttl or (CUSTOM_TTL if options.cache_key is not None else 0)
