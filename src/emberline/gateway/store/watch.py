"""Watch: when what was read from the store has to be read again. Every change raises the store's version; whoever keeps
a copy asks for it, at most every `fresh` seconds, so a key revoked on one replica is unknown to all by then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from emberline.core.clock import Clock
from emberline.gateway.errors import StoreFailed
from emberline.gateway.store.base import Store

LONGEST = 1.0  # seconds that a request waits for a store that hangs, one of many every `fresh` seconds
PATIENCE = 10.0  # seconds that all wait at most when there is nothing to go on with

K = TypeVar("K")
V = TypeVar("V")


class Watch:
    """A store that does not answer is taken to be as it was for `grace` seconds: no outage for those known by then."""

    def __init__(self, store: Store, clock: Clock, *, fresh: float = 0.5, grace: float = 30.0) -> None:
        assert 0 <= fresh <= grace
        self._store = store
        self._clock = clock
        self._fresh, self._grace = fresh, grace
        self._version = -1
        self._asked = self._answered = -grace - 1.0 + clock.now()
        self._asking: asyncio.Task[None] | None = None  # for all

    @property
    def known(self) -> int | None:
        """The version, if it was asked for a moment ago."""
        return self._version if self._clock.now() - self._asked < self._fresh else None

    async def version(self) -> int:
        now = self._clock.now()
        if now - self._asked < self._fresh:
            return self._version
        if now - self._answered > self._grace:
            return await self._first()
        self._asked = now  # others that come meanwhile go on with what is known
        with contextlib.suppress(StoreFailed, TimeoutError):
            await self._ask(LONGEST)
        return self._version

    async def _ask(self, longest: float) -> None:
        now = self._clock.now()
        async with asyncio.timeout(longest):
            version = await self._store.version()
        if now >= self._answered:  # else a later question was answered before
            self._version, self._answered, self._asked = version, now, max(self._asked, now)

    async def _first(self) -> int:
        """Or the first after a while: it may have been away, as a disk that slept; all wait for one answer."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(PATIENCE))
            self._asking.add_done_callback(self._was_asked)
        try:
            await asyncio.shield(self._asking)
        except (StoreFailed, TimeoutError) as e:
            raise StoreFailed("the store does not answer", hint="it is asked again with the next request") from e
        return self._version

    def _was_asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # all who waited may have left


class Remembered(Generic[K, V]):
    """What was loaded from the store, until it changes. Of too many, the oldest goes."""

    def __init__(self, watch: Watch, most: int = 10_000) -> None:
        self._watch = watch
        self._most = most
        self._version = -1
        self._values: dict[K, V] = {}

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        if (version := self._watch.known) is None:
            version = await self._watch.version()
        if version != self._version:
            self._values.clear()
            self._version = version
        if key in self._values:
            return self._values[key]
        value = await load()
        if self._version == version:  # else it may be from before a change
            self._values[key] = value
            while len(self._values) > self._most:
                del self._values[next(iter(self._values))]
        return value
