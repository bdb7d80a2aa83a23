"""EvictionPolicy: chooses the block to evict when a tier is full. It works on block hashes only.

LRU evicts the least recently used block. ARC (Megiddo and Modha, 2003) separates blocks that were used once
(`_used_once`) from blocks that were used again (`_used_again`), and remembers the hashes that were evicted from each of
the two lists. It gives more capacity to the list whose evicted blocks are requested again. So many prompts that never
repeat do not evict the prompts that do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from emberline.core.errors import InvalidRequest

CanEvict = Callable[[bytes], bool]  # returns whether a block may be evicted now


class EvictionPolicy(Protocol):
    def __len__(self) -> int: ...

    def __contains__(self, block_hash: bytes) -> bool: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def record_use(self, block_hash: bytes) -> None:
        """Record a use of a stored block."""
        ...

    def evict(self, incoming_hash: bytes, can_evict: CanEvict) -> bytes | None:
        """Remove and return the hash of the block to evict, or None if no block may be evicted.

        `incoming_hash` is the block that needs the space.
        """
        ...

    def insert(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None:
        """Remove a block that was deleted for a reason other than eviction."""
        ...


class LRUPolicy:
    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def record_use(self, block_hash: bytes) -> None:
        self._keys.move_to_end(block_hash)

    def evict(self, incoming_hash: bytes, can_evict: CanEvict) -> bytes | None:
        return _evict_first_allowed(self._keys, can_evict)

    def insert(self, block_hash: bytes) -> None:
        assert block_hash not in self._keys
        self._keys[block_hash] = None

    def remove(self, block_hash: bytes) -> None:
        del self._keys[block_hash]


class ARCPolicy:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used_once: OrderedDict[bytes, None] = OrderedDict()
        self._used_again: OrderedDict[bytes, None] = OrderedDict()
        self._evicted_once: OrderedDict[bytes, None] = OrderedDict()  # evicted; only their hashes are kept
        self._evicted_again: OrderedDict[bytes, None] = OrderedDict()
        self._target_once = 0.0  # target length of `_used_once` ("p" in the paper)

    def __len__(self) -> int:
        return len(self._used_once) + len(self._used_again)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._used_once or block_hash in self._used_again

    def __iter__(self) -> Iterator[bytes]:
        yield from self._used_once
        yield from self._used_again

    def record_use(self, block_hash: bytes) -> None:
        self._used_once.pop(block_hash, None)
        self._used_again[block_hash] = None
        self._used_again.move_to_end(block_hash)

    def evict(self, incoming_hash: bytes, can_evict: CanEvict) -> bytes | None:
        was_evicted = incoming_hash in self._evicted_again
        if incoming_hash in self._evicted_once:
            step = max(len(self._evicted_again) / len(self._evicted_once), 1.0)
            self._target_once = min(self._target_once + step, float(self._capacity))
        elif was_evicted:
            step = max(len(self._evicted_once) / len(self._evicted_again), 1.0)
            self._target_once = max(self._target_once - step, 0.0)
        exceeds_target = len(self._used_once) > self._target_once or (
            was_evicted and len(self._used_once) == self._target_once
        )
        lists = [(self._used_once, self._evicted_once), (self._used_again, self._evicted_again)]
        for stored, evicted in lists if self._used_once and exceeds_target else reversed(lists):
            if (key := _evict_first_allowed(stored, can_evict)) is not None:
                evicted[key] = None
                return key
        return None

    def insert(self, block_hash: bytes) -> None:
        assert block_hash not in self
        was_evicted = block_hash in self._evicted_once or block_hash in self._evicted_again
        self._evicted_once.pop(block_hash, None)
        self._evicted_again.pop(block_hash, None)
        (self._used_again if was_evicted else self._used_once)[block_hash] = None
        if len(self._used_once) + len(self._evicted_once) > self._capacity and self._evicted_once:
            self._evicted_once.popitem(last=False)
        if len(self) + len(self._evicted_once) + len(self._evicted_again) > 2 * self._capacity and self._evicted_again:
            self._evicted_again.popitem(last=False)

    def remove(self, block_hash: bytes) -> None:
        del (self._used_once if block_hash in self._used_once else self._used_again)[block_hash]


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    if name not in ("lru", "arc"):
        raise InvalidRequest(f"kv_policy is {name!r}, but must be lru or arc", param="kv_policy")
    return LRUPolicy() if name == "lru" else ARCPolicy(capacity)


def _evict_first_allowed(hashes: OrderedDict[bytes, None], can_evict: CanEvict) -> bytes | None:
    key = next((key for key in hashes if can_evict(key)), None)
    if key is not None:
        del hashes[key]
    return key
