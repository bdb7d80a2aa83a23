"""CacheLayer: answers a repeated request from the cache. Only complete, successful replies are stored.

If equal requests arrive together, one of them is sent, and the others wait for its reply. If that request fails, each
of the waiting requests is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emberline.core.clock import Clock
from emberline.gateway.cache.base import MAX_ENTRY_BYTES, CacheStore
from emberline.gateway.cache.entry import CacheEntry, RecordedStream
from emberline.gateway.cache.key import cache_key
from emberline.gateway.cache.single_flight import FlightOutcome, SingleFlight
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler

if TYPE_CHECKING:
    from emberline.gateway.cache.semantic import (  # imports numpy, which most gateways do not need
        SemanticCache,
        SemanticLookup,
    )

CUSTOM_KEY_TTL_S = 300  # for a call with its own cache key and no TTL
MAX_SHARED_WAIT_S = 30.0  # for the reply of an equal call


@dataclass(slots=True)
class CacheStats:
    hits: int = 0
    misses: int = 0
    shared: int = 0  # hits that waited for a call in flight
    stored: int = 0
    too_large: int = 0


@dataclass(frozen=True, slots=True)
class _CacheLookup:
    call: GatewayRequest
    key: str
    ttl_s: int


class CacheLayer:
    def __init__(
        self,
        store: CacheStore,
        clock: Clock,
        make_semantic_cache: Callable[[], SemanticCache] | None = None,
        *,
        max_wait_s: float = MAX_SHARED_WAIT_S,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
    ) -> None:
        """Create the layer. `make_semantic_cache` is called when a gateway first uses the semantic cache."""
        self._store, self._clock, self._make_semantic = store, clock, make_semantic_cache
        self._max_wait_s, self._max_entry_bytes = max_wait_s, max_entry_bytes
        self.semantic: SemanticCache | None = None
        self._in_flight = SingleFlight()
        self.stats = CacheStats()

    def wrap(self, inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            ttl_s = cache_ttl_s(call)
            return find_or_forward(_CacheLookup(call, cache_key(call), ttl_s)) if ttl_s else inner(call)

        async def find_or_forward(lookup: _CacheLookup) -> GatewayReply:
            return await self._find_or_wait(lookup) or await self._forward_call(lookup, inner)

        return handle

    async def _find_or_wait(self, lookup: _CacheLookup) -> GatewayReply | None:
        """Return the cached reply, or None if the request must be sent. Wait if an equal request is in flight."""
        deadline = min(self._clock.now() + self._max_wait_s, lookup.call.deadline)
        waited = False
        while True:
            if (found := await self._find_reply(lookup)) is not None:
                self.stats.hits += 1
                self.stats.shared += waited
                return found
            flight = self._in_flight.get(lookup.key)
            if flight is None:
                return None
            outcome = await self._in_flight.wait(flight, deadline - self._clock.now())
            if outcome in (None, "failed"):
                return None
            waited = True

    async def _find_reply(self, lookup: _CacheLookup) -> GatewayReply | None:
        entry = await self._load_entry(lookup.key)
        return entry.to_reply() if entry is not None else None

    async def _load_entry(self, key: str) -> CacheEntry | None:
        data = await self._store.get(key)
        return CacheEntry.decode(data) if data is not None else None

    async def _forward_call(self, lookup: _CacheLookup, inner: Handler) -> GatewayReply:
        first = self._in_flight.get(lookup.key) is None  # otherwise that one failed or is too slow: send this one too
        flight = self._in_flight.start(lookup.key) if first else None
        try:
            semantic_lookup = await self._look_up_similar(lookup.call)
            if (
                semantic_lookup is not None
                and (similar := await self._find_similar_reply(lookup, semantic_lookup)) is not None
            ):
                self._resolve_waiting_calls(lookup, flight, "stored")
                return similar
            self.stats.misses += 1
            reply = await inner(lookup.call)
        except BaseException as e:
            self._resolve_waiting_calls(lookup, flight, "left" if isinstance(e, asyncio.CancelledError) else "failed")
            raise
        if reply.status != 200 or reply.error:
            self._resolve_waiting_calls(lookup, flight, "failed")
            return reply
        # The body is captured now, because outer layers may replace it before the reply ends.
        body = reply.body if isinstance(reply.body, bytes) else RecordedStream(reply.body, self._max_entry_bytes)
        reply.body = body

        async def store_on_end(reply: GatewayReply) -> None:
            outcome: FlightOutcome = "left" if reply.ended == "left" else "failed"
            entry = None
            try:
                if reply.ended == "complete" and reply.status == 200:
                    entry = await self._store_reply(lookup, reply, body)
                    outcome = "failed" if entry is None else "stored"
            finally:
                self._resolve_waiting_calls(lookup, flight, outcome)
            if entry is not None and semantic_lookup is not None:
                await self._index_reply(lookup, semantic_lookup, entry)

        reply.close_callbacks.append(store_on_end)
        return reply

    async def _look_up_similar(self, call: GatewayRequest) -> SemanticLookup | None:
        if self._make_semantic is None or call.settings.semantic.mode == "off":
            return None
        if self.semantic is None:
            self.semantic = self._make_semantic()
        return await self.semantic.look_up(call)

    async def _find_similar_reply(self, lookup: _CacheLookup, semantic_lookup: SemanticLookup) -> GatewayReply | None:
        """Return the cached reply to a similar prompt, and store it also under this request's cache key."""
        assert self.semantic is not None
        if semantic_lookup.similar is None or lookup.call.settings.semantic.mode != "on":
            return None
        entry = await self._load_entry(semantic_lookup.similar.key)
        if entry is None:
            return None
        await self._store.put(lookup.key, entry.encode(), semantic_lookup.similar.expires - self._clock.now())
        self.semantic.stats.served += 1
        reply = entry.to_reply()
        reply.headers["x-emberline-cache"] = f"semantic; similarity={semantic_lookup.similar.similarity:.4f}"
        return reply

    async def _index_reply(self, lookup: _CacheLookup, semantic_lookup: SemanticLookup, entry: CacheEntry) -> None:
        assert self.semantic is not None
        self.semantic.index_question(semantic_lookup, lookup.key, lookup.ttl_s)
        if (
            semantic_lookup.similar is not None
            and (similar := await self._load_entry(semantic_lookup.similar.key)) is not None
        ):
            await self.semantic.compare_replies(similar, entry)

    async def _store_reply(
        self, lookup: _CacheLookup, reply: GatewayReply, body: bytes | RecordedStream
    ) -> CacheEntry | None:
        if isinstance(body, bytes):
            is_complete, chunks = len(body) <= self._max_entry_bytes, [body]
        else:
            is_complete, chunks = body.is_complete, body.chunks
        if not is_complete:
            self.stats.too_large += 1
            return None
        entry = CacheEntry.from_reply(reply, chunks, isinstance(body, RecordedStream))
        await self._store.put(lookup.key, entry.encode(), lookup.ttl_s)
        self.stats.stored += 1
        return entry

    def _resolve_waiting_calls(
        self, lookup: _CacheLookup, shared_call: asyncio.Future[FlightOutcome] | None, outcome: FlightOutcome
    ) -> None:
        if shared_call is not None:
            self._in_flight.finish(lookup.key, shared_call, outcome)


def cache_ttl_s(call: GatewayRequest) -> int:
    """Return for how many seconds the reply is cached, or 0 if the request must not use the cache."""
    options = call.options
    private = call.settings.zdr if options.zdr is None else options.zdr
    if options.skip_cache or private or call.method != "POST":
        return 0
    if options.cache_ttl is not None:
        return options.cache_ttl
    return call.settings.cache_ttl or (CUSTOM_KEY_TTL_S if options.cache_key is not None else 0)
