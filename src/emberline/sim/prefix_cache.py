"""SimPrefixCache: the simulated KV cache of a FastWorker. It holds parts of prompts, such as messages, not blocks.

Parts form a tree: the parent of a part is the part before it in the prompt. As in the KV manager, tokens of running
requests are not evicted. Of the other tokens, the least recently used are evicted first, from the end of a prompt."""

from __future__ import annotations

import heapq
import itertools

from emberline.sim.prompt import SimRequest


class CachedPart:
    __slots__ = ("digest", "last_used", "num_children", "num_holders", "num_tokens", "parent", "start")

    def __init__(self, digest: bytes, parent: CachedPart | None, start: int, num_tokens: int) -> None:
        self.digest = digest
        self.parent = parent
        self.start = start  # position of its first token in the prompt
        self.num_tokens = num_tokens  # tokens that are in the cache; the rest was evicted
        self.num_children = 0
        self.num_holders = 0  # running requests that end in this part, or are about to continue it
        self.last_used = 0.0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class SimPrefixCache:
    def __init__(self, capacity_tokens: int, block_size: int) -> None:
        self._capacity = capacity_tokens
        self._block_size = block_size
        self._parts: dict[bytes, CachedPart] = {}
        # Parts that may be evicted, least recently used first. An entry is out of date if its part was used since.
        self._idle: list[tuple[float, int, CachedPart]] = []
        self._numbers = itertools.count()
        self.num_used = 0  # tokens of parts, and of running requests

    def hold_prefix(self, request: SimRequest) -> tuple[CachedPart | None, int]:
        """Hold (protect from eviction) the longest cached prefix of a prompt. Return its last part and its length."""
        for digest in reversed(request.digests):
            if (part := self._parts.get(digest)) is not None:
                part.num_holders += 1
                return part, part.end
        return None, 0

    def release(self, part: CachedPart | None, now: float) -> None:
        if part is not None:
            part.num_holders -= 1
            part.last_used = now
            self._mark_if_idle(part)

    def allocate(self, num_tokens: int) -> bool:
        """Count tokens of a running request as used, and return True. Return False if they do not fit."""
        if not self.make_room(num_tokens):
            return False
        self.num_used += num_tokens
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Evict parts until `num_tokens` tokens are free. Return False if running requests use too many tokens."""
        while (excess := self.num_used + num_tokens - self._capacity) > 0:
            if not self._evict(excess):
                return False
        return True

    @property
    def num_free(self) -> int:
        return self._capacity - self.num_used

    def add_prompt(
        self, request: SimRequest, held: CachedPart | None, num_computed: int, now: float
    ) -> tuple[CachedPart | None, int]:
        """Move the first `num_computed` tokens of a prompt, which the request has allocated, to parts of the cache.

        The request now holds the last of these parts, instead of `held`. Return that part, and how many of the
        allocated tokens have moved to parts, where other requests can share them."""
        first, part, shared = 0, held, 0
        if held is not None:
            first = len(request.digests) - 1
            while request.digests[first] != held.digest:
                first -= 1
            shared += self._extend(held, min(request.parts[first].num_tokens, num_computed - held.start))
            first += 1
        for i in range(first, len(request.digests)):
            start = part.end if part is not None else 0
            if start >= num_computed or (part is not None and part.num_tokens < request.parts[i - 1].num_tokens):
                break
            part, added = self._add_part(
                request.digests[i], part, min(request.parts[i].num_tokens, num_computed - start)
            )
            shared += added
        if part is not None and part is not held:
            part.num_holders += 1
            self.release(held, now)
        return part, shared

    def add_reply(self, request: SimRequest, last: CachedPart | None, num_tokens: int) -> int:
        """Add a reply after the last part of its prompt, and return how many of its tokens are now shared."""
        return self._add_part(request.reply_digest, last, num_tokens)[1] if num_tokens else 0

    def _add_part(self, digest: bytes, parent: CachedPart | None, num_tokens: int) -> tuple[CachedPart, int]:
        if (part := self._parts.get(digest)) is not None:
            return part, self._extend(part, num_tokens)
        part = self._parts[digest] = CachedPart(digest, parent, parent.end if parent is not None else 0, num_tokens)
        if parent is not None:
            parent.num_children += 1
            part.last_used = parent.last_used
        self._mark_if_idle(part)
        return part, num_tokens

    def _extend(self, part: CachedPart, num_tokens: int) -> int:
        """Extend a part, whose end may have been evicted, to `num_tokens` tokens. Return how many were added."""
        added = max(0, num_tokens - part.num_tokens)
        part.num_tokens += added
        return added

    def _mark_if_idle(self, part: CachedPart) -> None:
        if not part.num_holders and not part.num_children:
            heapq.heappush(self._idle, (part.last_used, next(self._numbers), part))

    def _evict(self, num_tokens: int) -> bool:
        """Evict up to `num_tokens` tokens, rounded up to blocks, of the least recently used part that may be evicted.

        Return False if there is no such part."""
        while self._idle:
            used_at, _, part = self._idle[0]
            if used_at != part.last_used or part.num_holders or part.num_children or not part.num_tokens:
                heapq.heappop(self._idle)
                continue
            evicted = min(part.num_tokens, -(-num_tokens // self._block_size) * self._block_size)
            part.num_tokens -= evicted
            self.num_used -= evicted
            if not part.num_tokens:
                heapq.heappop(self._idle)
                self._remove(part)
            return True
        return False

    def _remove(self, part: CachedPart) -> None:
        del self._parts[part.digest]
        if (parent := part.parent) is not None:
            parent.num_children -= 1
            parent.last_used = max(parent.last_used, part.last_used)
            self._mark_if_idle(parent)

    def check_unheld(self) -> None:
        """Assert that no request holds a part, and that the number of used tokens is the sum over all parts."""
        assert not any(part.num_holders for part in self._parts.values())
        assert self.num_used == sum(part.num_tokens for part in self._parts.values()) <= self._capacity
