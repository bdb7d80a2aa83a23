"""EvictionPolicy: chooses the block to evict when a tier is full.

Pure: works on hashes and their order of use.

LRU evicts the least recently used block. ARC (Megiddo and Modha, 2003) keeps blocks used once (`_used_once`) apart from
blocks used again (`_used_again`) and remembers the hashes evicted from each list. It shifts capacity to the list whose
evicted blocks are requested again, so a scan of prompts that never repeat does not evict prompts that do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from emberline.core.errors import InvalidRequest

May = Callable[[bytes], bool]  # returns whether a block may be evicted now


class Policy(Protocol):
    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def touch(self, key: bytes) -> None:
        """Record a use of a stored block."""
        ...

    def evict(self, incoming: bytes, may: May) -> bytes | None:
        """Remove and return the block to evict for `incoming`, or None if no block may be evicted."""
        ...

    def insert(self, key: bytes) -> None: ...

    def remove(self, key: bytes) -> None:
        """Remove a block that was deleted without `evict`."""
        ...


class LRU:
    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def touch(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def evict(self, incoming: bytes, may: May) -> bytes | None:
        return _drop(self._keys, may)

    def insert(self, key: bytes) -> None:
        assert key not in self._keys
        self._keys[key] = None

    def remove(self, key: bytes) -> None:
        del self._keys[key]


class ARC:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._left_once: OrderedDict[bytes, None] = OrderedDict()  # evicted; only their hashes are kept
        self._left_again: OrderedDict[bytes, None] = OrderedDict()
        self._border = 0.0  # target length of `_used_once` ("p" in the paper)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    def __iter__(self) -> Iterator[bytes]:
        yield from self._once
        yield from self._again

    def touch(self, key: bytes) -> None:
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def evict(self, incoming: bytes, may: May) -> bytes | None:
        returns = incoming in self._left_again
        if incoming in self._left_once:
            step = max(len(self._left_again) / len(self._left_once), 1.0)
            self._border = min(self._border + step, float(self._capacity))
        elif returns:
            step = max(len(self._left_once) / len(self._left_again), 1.0)
            self._border = max(self._border - step, 0.0)
        over = len(self._once) > self._border or (returns and len(self._once) == self._border)
        lists = [(self._once, self._left_once), (self._again, self._left_again)]
        for stored, evicted in lists if self._once and over else reversed(lists):
            if (key := _drop(stored, may)) is not None:
                evicted[key] = None
                return key
        return None

    def insert(self, key: bytes) -> None:
        assert key not in self
        returns = key in self._left_once or key in self._left_again
        self._left_once.pop(key, None)
        self._left_again.pop(key, None)
        (self._again if returns else self._once)[key] = None
        if len(self._once) + len(self._left_once) > self._capacity and self._left_once:
            self._left_once.popitem(last=False)
        if len(self) + len(self._left_once) + len(self._left_again) > 2 * self._capacity and self._left_again:
            self._left_again.popitem(last=False)

    def remove(self, key: bytes) -> None:
        del (self._once if key in self._once else self._again)[key]


def policy_of(name: str, capacity: int) -> Policy:
    if name not in ("lru", "arc"):
        raise InvalidRequest(f"kv_policy is {name!r}; it must be lru or arc", param="kv_policy")
    return LRU() if name == "lru" else ARC(capacity)


def _drop(keys: OrderedDict[bytes, None], may: May) -> bytes | None:
    key = next((key for key in keys if may(key)), None)
    if key is not None:
        del keys[key]
    return key
