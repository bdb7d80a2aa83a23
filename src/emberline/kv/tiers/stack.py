"""TierStack: the tiers below a main cache as one. Main memory comes first, and everything else goes through it.

    main cache <--copies in plans--> host buffers <--a reader and a writer thread--> tiers below

Stores are written behind: a full block is copied to a host buffer by the next plan, and from there to the tiers below
by the writer, whose queue is bounded; what does not fit is dropped. Loads are the same way back: a Fetch delivers
pinned host buffers in order, at once if host memory has them, or as the reader brings them up, where they stay for the
next. Nothing here makes the engine's loop wait, and nothing that fails reaches it: a Fetch just ends early.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.core.clock import Clock, SystemClock
from emberline.core.events import TierStats
from emberline.kv.tiers.base import Tier
from emberline.kv.tiers.host import HostTier

MOST_WRITES = 256  # blocks that wait for the writer; never more than half of the buffers
REFRESH = 5.0  # seconds between looks at what others did
STUCK = 1.0  # seconds for one block; a reader that needs longer is given nothing more to do


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block in a host buffer, pinned until TierStack.loaded."""

    digest: bytes
    buffer: memoryview
    tier: str  # where it was found


@dataclass(slots=True, eq=False)
class Fetch:
    """Leading blocks of a prefix on their way up. Touched under the stack's lock only."""

    hashes: Sequence[bytes]
    arrived: int = 0
    ready: list[Arrival] = field(default_factory=list)
    ended: bool = False  # complete, failed or cancelled


class TierStack:
    def __init__(
        self, host: HostTier, below: Sequence[Tier] = (), *, clock: Clock | None = None, threads: bool = True
    ) -> None:
        """Without threads, whoever calls `read_next` and `write_next` does their work: tests do."""
        self.host = host
        self.below = list(below)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._fetches: deque[Fetch] = deque()  # that the reader has to do with
        self._writes: dict[bytes, memoryview] = {}  # in order, pinned
        self._most_writes = min(MOST_WRITES, host.capacity // 2)
        self._dropped = {"host": 0, "below": 0}
        self._reading_since: float | None = None
        self._hit_tokens = {tier.name: 0 for tier in (host, *self.below)}
        self._hit_blocks = dict(self._hit_tokens)
        self._to_read, self._to_write = threading.Event(), threading.Event()
        self._news = threading.Event()
        self._closed = False
        loops = (self._read_loop, self._write_loop) if threads and self.below else ()
        self._threads = [threading.Thread(target=loop, daemon=True, name=loop.__name__) for loop in loops]
        for thread in self._threads:
            thread.start()

    # -- loads: the engine's side -------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain are worth fetching, from the first on, wherever each of them lies."""
        tiers: list[Tier] = [self.host, *(() if self._stuck() else self.below)]
        count = 0
        while count < len(hashes) and (more := max(tier.guess(hashes[count:]) for tier in tiers)):
            count += more
        return count

    def fetch(self, hashes: Sequence[bytes]) -> Fetch:
        fetch = Fetch(hashes)
        for digest in hashes:
            buffer = self.host.pin(digest)
            if buffer is None:
                break
            fetch.ready.append(Arrival(digest, buffer, self.host.name))
        fetch.arrived = len(fetch.ready)
        with self._lock:
            fetch.ended = fetch.arrived == len(hashes) or not self.below
            if not fetch.ended:
                self._fetches.append(fetch)
        self._to_read.set()
        return fetch

    def take(self, fetch: Fetch) -> tuple[list[Arrival], bool]:
        """What has come since the last time, and whether that is all."""
        with self._lock:
            arrivals, fetch.ready = fetch.ready, []
            return arrivals, fetch.ended

    def loaded(self, digest: bytes) -> None:
        """An arrival's buffer is no longer read."""
        self.host.unpin(digest)
        self._to_read.set()

    def cancel(self, fetch: Fetch) -> None:
        with self._lock:
            arrivals, fetch.ready, fetch.ended = fetch.ready, [], True
            if fetch in self._fetches:
                self._fetches.remove(fetch)
        for arrival in arrivals:
            self.loaded(arrival.digest)

    def count(self, tier: str, tokens: int) -> None:
        """Tokens that a request has from a tier."""
        self._hit_tokens[tier] += tokens
        self._hit_blocks[tier] += 1

    def wait(self, seconds: float) -> None:
        """Until something has arrived."""
        self._news.wait(seconds)
        self._news.clear()

    # -- stores: the engine's side ------------------------------------------------------------------------------------

    def reserve(self, digest: bytes) -> memoryview | None:
        """A buffer for a block that no buffer has; None: there is nothing to do, or no room."""
        buffer = self.host.reserve(digest)
        if buffer is None and digest in self.host:
            self._write_later(digest)  # perhaps it is not below
        elif buffer is None:
            self._dropped["host"] += 1
        return buffer

    def saved(self, digest: bytes) -> None:
        """A reserved buffer is full."""
        self.host.publish(digest)
        self._write_later(digest)
        self._to_read.set()

    def _write_later(self, digest: bytes) -> None:
        if all(tier.lookup([digest]) for tier in self.below):
            return
        with self._lock:
            if digest in self._writes:
                return
            if len(self._writes) >= self._most_writes:
                self._dropped["below"] += 1
            elif (buffer := self.host.pin(digest)) is not None:
                self._writes[digest] = buffer
        self._to_write.set()

    # -- the threads' side --------------------------------------------------------------------------------------------

    def read_next(self) -> bool:
        """Brings one block up. False: there is none to bring, or no buffer for it now."""
        with self._lock:
            if not self._fetches:
                return False
            fetch = self._fetches[0]
            digest = fetch.hashes[fetch.arrived]
        where, buffer = self.host.name, self.host.pin(digest)
        if buffer is None:
            room = self.host.reserve(digest)
            if room is None:
                return False  # buffers come back when plans have been carried out
            tier = self._bring(digest, room, fetch.hashes[fetch.arrived + 1 :])
            where, buffer = (tier, room) if tier is not None else ("", None)
        with self._lock:
            wanted = not fetch.ended
            if wanted and buffer is not None:
                fetch.ready.append(Arrival(digest, buffer, where))
                fetch.arrived += 1
            if wanted and (buffer is None or fetch.arrived == len(fetch.hashes)):
                fetch.ended = True
                self._fetches.remove(fetch)
        if buffer is not None and not wanted:
            self.host.unpin(digest)
        self._news.set()
        return True

    def _bring(self, digest: bytes, room: memoryview, rest: Sequence[bytes]) -> str | None:
        """Return the name of the tier that had the block. A tier where it was damaged forgets the rest of the prefix,
        which may be damaged too and would not be looked at before the next restart: all of it is written again."""
        self._reading_since = self._clock.now()
        for tier in self.below:
            damaged = tier.stats().damaged_blocks
            if tier.load([digest], [room]):
                self.host.publish(digest, pin=True)
                self._reading_since = None
                return tier.name
            if tier.stats().damaged_blocks > damaged:
                tier.forget(rest)
        self.host.abandon(digest)
        self._reading_since = None
        return None

    def write_next(self) -> bool:
        """Writes one block to where it is missing. False: there is none to write."""
        with self._lock:
            if not self._writes:
                return False
            digest, buffer = next(iter(self._writes.items()))
        for tier in self.below:
            if not tier.lookup([digest]):
                tier.store([digest], [buffer])
        with self._lock:
            del self._writes[digest]
        self.host.unpin(digest)
        self._to_read.set()
        return True

    def _stuck(self) -> bool:
        since = self._reading_since
        return since is not None and self._clock.now() - since > STUCK

    def _read_loop(self) -> None:
        self._loop(self._to_read, self.read_next)

    def _write_loop(self) -> None:
        refreshed = self._clock.now()

        def work() -> bool:
            nonlocal refreshed
            if self._clock.now() - refreshed > REFRESH:
                for tier in self.below:
                    tier.refresh()
                refreshed = self._clock.now()
            return self.write_next()

        self._loop(self._to_write, work)

    def _loop(self, event: threading.Event, work: Callable[[], bool]) -> None:
        while not self._closed:
            event.wait(REFRESH)
            event.clear()
            while not self._closed and work():
                pass

    # -- ends and figures ---------------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Waits until all that was to be written is, or for so long."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            with self._lock:
                if not self._writes:
                    return True
            time.sleep(0.002)
        return False

    def close(self, seconds: float = 5.0) -> None:
        if self._threads:
            self.flush(seconds)
        self._closed = True
        self._to_read.set()
        self._to_write.set()
        for thread in self._threads:
            thread.join(seconds)
        for tier in (*self.below, self.host):
            tier.close()

    def stats(self) -> dict[str, TierStats]:
        figures = {tier.name: tier.stats() for tier in (self.host, *self.below)}
        for name, stats in figures.items():
            stats.hit_tokens = self._hit_tokens[name]
            stats.dropped_blocks += self._dropped["host" if name == self.host.name else "below"]
        host = figures[self.host.name]
        host.loaded_blocks += self._hit_blocks[self.host.name]
        host.loaded_bytes = host.loaded_blocks * self.host.buffer_bytes
        return figures
