"""StoreVersionWatch and StoreCache: cache values from the store until the store changes.

Every change increases the store's version. A cache reads the version at most every `fresh_s` seconds, so a key that is
revoked on one replica is rejected by all replicas after that time, unless the store does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from emberline.core.clock import Clock
from emberline.gateway.core.errors import StoreFailed
from emberline.gateway.store.base import GatewayStore

VERSION_TIMEOUT_S = 1.0  # one request every `fresh_s` waits so long for a store that hangs
FIRST_VERSION_TIMEOUT_S = 10.0  # all requests wait so long if no recent version is known

K = TypeVar("K")
V = TypeVar("V")


class StoreVersionWatch:
    """The store's version number.

    If the store does not answer, the last known version stays valid for `grace_s` seconds.
    """

    def __init__(self, store: GatewayStore, clock: Clock, *, fresh_s: float = 0.5, grace_s: float = 30.0) -> None:
        assert 0 <= fresh_s <= grace_s
        self._store = store
        self._clock = clock
        self._fresh_s, self._grace_s = fresh_s, grace_s
        self._version = -1
        self._read_at = self._answered_at = -grace_s - 1.0 + clock.now()
        self._pending_read: asyncio.Task[None] | None = None  # shared by all callers

    @property
    def recent_version(self) -> int | None:
        """The version if it was read less than `fresh_s` seconds ago, else None."""
        return self._version if self._clock.now() - self._read_at < self._fresh_s else None

    async def version(self) -> int:
        """Return the version, reading it again if it is not recent. Raise StoreFailed if no version is valid."""
        now = self._clock.now()
        if now - self._read_at < self._fresh_s:
            return self._version
        if now - self._answered_at > self._grace_s:
            return await self._read_first_version()
        self._read_at = now  # concurrent callers use the last version
        with contextlib.suppress(StoreFailed, TimeoutError):
            await self._read_version(VERSION_TIMEOUT_S)
        return self._version

    async def _read_version(self, timeout_s: float) -> None:
        now = self._clock.now()
        async with asyncio.timeout(timeout_s):
            version = await self._store.version()
        if now >= self._answered_at:  # else a later read was answered first
            self._version, self._answered_at, self._read_at = version, now, max(self._read_at, now)

    async def _read_first_version(self) -> int:
        """Read the version when none is known, or when the last known version is older than `grace_s`.

        All callers share one read. It has a long timeout, because a disk may need seconds to wake up.
        """
        if self._pending_read is None:
            self._pending_read = asyncio.create_task(self._read_version(FIRST_VERSION_TIMEOUT_S))
            self._pending_read.add_done_callback(self._finish_read)
        try:
            await asyncio.shield(self._pending_read)
        except (StoreFailed, TimeoutError) as e:
            reason = e.message if isinstance(e, StoreFailed) else f"no answer within {FIRST_VERSION_TIMEOUT_S:g} s"
            raise StoreFailed(
                f"the gateway's store cannot be read: {reason}",
                hint="check the store's disk or database server; the next request reads it again",
            ) from e
        return self._version

    def _finish_read(self, task: asyncio.Task[None]) -> None:
        self._pending_read = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all waiting callers may have been cancelled


class StoreCache(Generic[K, V]):
    """A cache of values from the store. It is emptied when the store changes.

    When it is full, the oldest entry is evicted.
    """

    def __init__(self, watch: StoreVersionWatch, max_entries: int = 10_000) -> None:
        self._watch = watch
        self._max_entries = max_entries
        self._version = -1
        self._values: dict[K, V] = {}

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """Return the cached value of `key`. If there is none, call `load` and cache the result."""
        if (version := self._watch.recent_version) is None:
            version = await self._watch.version()
        if version != self._version:
            self._values.clear()
            self._version = version
        if key in self._values:
            return self._values[key]
        value = await load()
        if self._version == version:  # else the value may be older than the change
            self._values[key] = value
            while len(self._values) > self._max_entries:
                del self._values[next(iter(self._values))]
        return value
