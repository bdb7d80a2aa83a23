"""Cached: who asks what was asked before gets the reply that was given. Only whole and good replies are kept; of equal
calls that come together one is sent, and those that waited in vain are sent themselves."""

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
    from emberline.gateway.cache.semantic import Look, Semantic  # has numpy with it, which most gateways do not need

CUSTOM_TTL = 300  # seconds, where a key is given and nothing says for how long
WAIT = 30.0  # seconds that one waits for another's reply


@dataclass(slots=True)
class CacheStats:
    hits: int = 0
    misses: int = 0
    shared: int = 0  # of the hits: waited for a call under way
    stored: int = 0
    too_large: int = 0


@dataclass(frozen=True, slots=True)
class _Ask:
    call: Call
    key: str
    seconds: int  # to keep it


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
        """`semantic` is made when the first gateway wants it."""
        self._store, self._clock, self._make = store, clock, semantic
        self._wait, self._largest = wait, largest
        self.semantic: Semantic | None = None
        self._flights = Flights()
        self.stats = CacheStats()

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            seconds = lifetime(call)
            return looked(_Ask(call, cache_key(call), seconds)) if seconds else inner(call)

        async def looked(ask: _Ask) -> Reply:
            return await self._known(ask) or await self._asked(ask, inner)

        return handle

    async def _known(self, ask: _Ask) -> Reply | None:
        """From the cache, now or when the same call that is under way has its reply."""
        until = min(self._clock.now() + self._wait, ask.call.deadline)
        waited = False
        while True:
            if (found := await self._found(ask)) is not None:
                self.stats.hits += 1
                self.stats.shared += waited
                return found
            flight = self._flights.running(ask.key)
            if flight is None:
                return None
            landing = await self._flights.wait(flight, until - self._clock.now())
            if landing in (None, "failed"):
                return None
            waited = True

    async def _found(self, ask: _Ask) -> Reply | None:
        entry = await self._entry(ask.key)
        return entry.reply() if entry is not None else None

    async def _entry(self, key: str) -> Entry | None:
        data = await self._store.get(key)
        return Entry.decoded(data) if data is not None else None

    async def _asked(self, ask: _Ask, inner: Handler) -> Reply:
        first = self._flights.running(ask.key) is None  # else that one failed, or is too slow: this goes by itself
        flight = self._flights.begin(ask.key) if first else None
        try:
            look = await self._look(ask.call)
            if look is not None and (meant := await self._meant(ask, look)) is not None:
                self._land(ask, flight, "stored")
                return meant
            self.stats.misses += 1
            reply = await inner(ask.call)
        except BaseException as e:
            self._land(ask, flight, "left" if isinstance(e, asyncio.CancelledError) else "failed")
            raise
        if reply.status != 200 or reply.error:
            self._land(ask, flight, "failed")
            return reply
        # As it is now: by its end others may have said it in other words.
        kept = reply.body if isinstance(reply.body, bytes) else Recording(reply.body, self._largest)
        reply.body = kept

        async def ended(reply: Reply) -> None:
            landing: Landing = "left" if reply.ended == "left" else "failed"
            entry = None
            try:
                if reply.ended == "complete" and reply.status == 200:
                    entry = await self._stored(ask, reply, kept)
                    landing = "failed" if entry is None else "stored"
            finally:
                self._land(ask, flight, landing)
            if entry is not None and look is not None:
                await self._learn(ask, look, entry)

        reply.endings.append(ended)
        return reply

    async def _look(self, call: Call) -> Look | None:
        if self._make is None or call.settings.semantic.mode == "off":
            return None
        if self.semantic is None:
            self.semantic = self._make()
        return await self.semantic.look(call)

    async def _meant(self, ask: _Ask, look: Look) -> Reply | None:
        """The reply to a question that means the same; from now on it is this one's too."""
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
        if look.near is not None and (would := await self._entry(look.near.key)) is not None:
            await self.semantic.compare(would, entry)

    async def _stored(self, ask: _Ask, reply: Reply, kept: bytes | Recording) -> Entry | None:
        if isinstance(kept, bytes):
            whole, chunks = len(kept) <= self._largest, [kept]
        else:
            whole, chunks = kept.whole, kept.chunks
        if not whole:
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
    """Seconds its reply is kept; 0: nothing of it is, nor looked for."""
    options = call.options
    private = call.settings.zdr if options.zdr is None else options.zdr
    if options.skip_cache or private or call.method != "POST":
        return 0
    if options.cache_ttl is not None:
        return options.cache_ttl
    return call.settings.cache_ttl or (CUSTOM_TTL if options.cache_key is not None else 0)
