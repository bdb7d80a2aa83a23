"""SimPrefixCache: the simulated KV cache of a FastWorker. It holds segments of prompts, such as messages, not blocks.

Segments form a tree: the parent of a segment precedes it in the prompt. As in the KV manager, tokens of running
requests are not evicted. Of the other tokens, the least recently used are evicted first, from the end of a prompt."""

from __future__ import annotations

import heapq
import itertools

from emberline.sim.prompt import SimRequest


class CachedSegment:
    __slots__ = ("digest", "last_used", "num_children", "num_holders", "num_tokens", "parent", "start")

    def __init__(self, digest: bytes, parent: CachedSegment | None, start: int, num_tokens: int) -> None:
        self.digest = digest
        self.parent = parent
        self.start = start  # position of its first token in the prompt
        self.num_tokens = num_tokens  # tokens that are in the cache; the rest was evicted
        self.num_children = 0
        self.num_holders = 0  # running requests that end in this segment, or are about to continue it
        self.last_used = 0.0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class SimPrefixCache:
    def __init__(self, capacity_tokens: int, block_size: int) -> None:
        self._capacity = capacity_tokens
        self._block_size = block_size
        self._segments: dict[bytes, CachedSegment] = {}
        # Segments that may be evicted, least recently used first. An entry is stale if its segment was used since.
        self._idle: list[tuple[float, int, CachedSegment]] = []
        self._numbers = itertools.count()
        self.num_used = 0  # tokens of segments, and of running requests

    def hold_prefix(self, request: SimRequest) -> tuple[CachedSegment | None, int]:
        """Hold (protect from eviction) the longest cached prefix of a prompt. Return its last segment and length."""
        for digest in reversed(request.digests):
            if (segment := self._segments.get(digest)) is not None:
                segment.num_holders += 1
                return segment, segment.end
        return None, 0

    def release(self, segment: CachedSegment | None, now: float) -> None:
        if segment is not None:
            segment.num_holders -= 1
            segment.last_used = now
            self._mark_if_idle(segment)

    def allocate(self, num_tokens: int) -> bool:
        """Count tokens of a running request as used, and return True. Return False if they do not fit."""
        if not self.make_room(num_tokens):
            return False
        self.num_used += num_tokens
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Evict segments until `num_tokens` tokens are free. Return False if running requests use too many tokens."""
        while (excess := self.num_used + num_tokens - self._capacity) > 0:
            if not self._evict(excess):
                return False
        return True

    @property
    def num_free(self) -> int:
        return self._capacity - self.num_used

    def add_prompt(
        self, request: SimRequest, held: CachedSegment | None, num_computed: int, now: float
    ) -> tuple[CachedSegment | None, int]:
        """Move the first `num_computed` tokens of a prompt, which the request has allocated, to segments of the cache.

        The request now holds the last of these segments, instead of `held`. Return that segment, and how many of the
        allocated tokens have moved to segments, where other requests can share them."""
        first, segment, shared = 0, held, 0
        if held is not None:
            first = len(request.digests) - 1
            while request.digests[first] != held.digest:
                first -= 1
            shared += self._extend(held, min(request.segments[first].num_tokens, num_computed - held.start))
            first += 1
        for i in range(first, len(request.digests)):
            start = segment.end if segment is not None else 0
            if start >= num_computed or (
                segment is not None and segment.num_tokens < request.segments[i - 1].num_tokens
            ):
                break
            segment, added = self._add_segment(
                request.digests[i], segment, min(request.segments[i].num_tokens, num_computed - start)
            )
            shared += added
        if segment is not None and segment is not held:
            segment.num_holders += 1
            self.release(held, now)
        return segment, shared

    def add_reply(self, request: SimRequest, last: CachedSegment | None, num_tokens: int) -> int:
        """Add a reply after the last segment of its prompt, and return how many of its tokens are now shared."""
        return self._add_segment(request.reply_digest, last, num_tokens)[1] if num_tokens else 0

    def _add_segment(self, digest: bytes, parent: CachedSegment | None, num_tokens: int) -> tuple[CachedSegment, int]:
        if (segment := self._segments.get(digest)) is not None:
            return segment, self._extend(segment, num_tokens)
        segment = self._segments[digest] = CachedSegment(
            digest, parent, parent.end if parent is not None else 0, num_tokens
        )
        if parent is not None:
            parent.num_children += 1
            segment.last_used = parent.last_used
        self._mark_if_idle(segment)
        return segment, num_tokens

    def _extend(self, segment: CachedSegment, num_tokens: int) -> int:
        """Extend a segment, whose end may have been evicted, to `num_tokens` tokens. Return how many were added."""
        added = max(0, num_tokens - segment.num_tokens)
        segment.num_tokens += added
        return added

    def _mark_if_idle(self, segment: CachedSegment) -> None:
        if not segment.num_holders and not segment.num_children:
            heapq.heappush(self._idle, (segment.last_used, next(self._numbers), segment))

    def _evict(self, num_tokens: int) -> bool:
        """Evict up to `num_tokens` tokens, rounded up to blocks, of the least recently used idle segment.

        Return False if there is no such segment."""
        while self._idle:
            used_at, _, segment = self._idle[0]
            if used_at != segment.last_used or segment.num_holders or segment.num_children or not segment.num_tokens:
                heapq.heappop(self._idle)
                continue
            evicted = min(segment.num_tokens, -(-num_tokens // self._block_size) * self._block_size)
            segment.num_tokens -= evicted
            self.num_used -= evicted
            if not segment.num_tokens:
                heapq.heappop(self._idle)
                self._remove(segment)
            return True
        return False

    def _remove(self, segment: CachedSegment) -> None:
        del self._segments[segment.digest]
        if (parent := segment.parent) is not None:
            parent.num_children -= 1
            parent.last_used = max(parent.last_used, segment.last_used)
            self._mark_if_idle(parent)

    def check_no_segment_is_held(self) -> None:
        """Assert that no request holds a segment, and that the number of used tokens is the sum over all segments."""
        assert not any(segment.num_holders for segment in self._segments.values())
        assert self.num_used == sum(segment.num_tokens for segment in self._segments.values()) <= self._capacity
