"""Policy: who leaves when a tier is full. Pure: it knows hashes and their order, nothing of bytes.

LRU drops what was not used for longest. ARC (Megiddo and Modha, 2003) keeps what was used once (`_once`) apart from
what was used again (`_again`), remembers whom it dropped from each, and moves the border between them towards the side
whose dropped blocks are asked for: a scan of prompts that nobody repeats cannot wash out those that come back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from emberline.core.errors import InvalidRequest

May = Callable[[bytes], bool]  # whether a block may leave now


class Policy(Protocol):
    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def touch(self, key: bytes) -> None:
        """It was used."""
        ...

    def evict(self, incoming: bytes, may: May) -> bytes | None:
        """Drops one so that another may come, or nobody if none may leave."""
        ...

    def insert(self, key: bytes) -> None: ...

    def remove(self, key: bytes) -> None:
        """It is gone, not by our choice."""
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
        self._left_once: OrderedDict[bytes, None] = OrderedDict()  # dropped; only their names are known
        self._left_again: OrderedDict[bytes, None] = OrderedDict()
        self._border = 0.0  # how many of `_once` are wanted

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
        sides = [(self._once, self._left_once), (self._again, self._left_again)]
        for kept, left in sides if self._once and over else reversed(sides):
            if (key := _drop(kept, may)) is not None:
                left[key] = None
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
        raise InvalidRequest(f"the policy is {name!r}; it must be lru or arc", param="kv_policy")
    return LRU() if name == "lru" else ARC(capacity)


def _drop(keys: OrderedDict[bytes, None], may: May) -> bytes | None:
    key = next((key for key in keys if may(key)), None)
    if key is not None:
        del keys[key]
    return key
