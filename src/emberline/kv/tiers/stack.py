"""TierStack: all tiers of a cache behind one interface.

Host memory is the first tier, and every block passes through it.

    main cache <--copies in plans--> host buffers <--a reader and a writer thread--> lower tiers

Stores are asynchronous: the next plan copies a full block to a host buffer, and the writer thread copies it from there
to the lower tiers. The writer's queue is bounded; blocks that do not fit are dropped. For loads, a TierFetch delivers
pinned host buffers in order: at once those in host memory, then the others as the reader thread loads them. They stay
in host memory for the next request. The engine's loop never waits here, and a failed load only ends its fetch early.
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

MOST_WRITES = 256  # blocks; also limited to half of the host buffers
REFRESH = 5.0
STUCK = 1.0  # while one block takes longer to read, lower tiers are not used for new requests


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block in a host buffer, pinned until TierStack.release_fetched."""

    digest: bytes
    buffer: memoryview
    tier: str  # name of the tier that held it


@dataclass(slots=True, eq=False)
class Fetch:
    """The leading blocks of a prefix being loaded into host buffers. Accessed only under the stack's lock."""

    hashes: Sequence[bytes]
    arrived: int = 0
    ready: list[Arrival] = field(default_factory=list)
    ended: bool = False  # complete, failed or cancelled


class TierStack:
    def __init__(
        self, host: HostTier, below: Sequence[Tier] = (), *, clock: Clock | None = None, threads: bool = True
    ) -> None:
        """Without `threads`, blocks move only when `read_next` or `write_next` is called, as tests do."""
        self.host = host
        self.below = list(below)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._fetches: deque[Fetch] = deque()  # with blocks left for the reader
        self._writes: dict[bytes, memoryview] = {}  # queue of the writer, in order; the buffers are pinned
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

    # -- loads: called by the engine's loop ---------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain are worth fetching, whichever tiers hold them."""
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
        """Return the blocks loaded since the last call, and whether the fetch has ended."""
        with self._lock:
            arrivals, fetch.ready = fetch.ready, []
            return arrivals, fetch.ended

    def loaded(self, digest: bytes) -> None:
        """Unpin the buffer of a fetched block."""
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
        """Count a block, with its tokens, that a request got from a tier."""
        self._hit_tokens[tier] += tokens
        self._hit_blocks[tier] += 1

    def wait(self, seconds: float) -> None:
        """Wait until a block has been loaded or a fetch has ended, or until the timeout."""
        self._news.wait(seconds)
        self._news.clear()

    # -- stores: called by the engine's loop --------------------------------------------------------------------------

    def reserve(self, digest: bytes) -> memoryview | None:
        """Return a host buffer to copy the block to, or None if host memory has the block or no free buffer."""
        buffer = self.host.reserve(digest)
        if buffer is None and digest in self.host:
            self._write_later(digest)  # the lower tiers may not have it
        elif buffer is None:
            self._dropped["host"] += 1
        return buffer

    def saved(self, digest: bytes) -> None:
        """Publish a filled buffer and queue it for the lower tiers."""
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

    # -- run by the threads -------------------------------------------------------------------------------------------

    def read_next(self) -> bool:
        """Load one block into host memory. Return False if no fetch needs one, or no buffer is free."""
        with self._lock:
            if not self._fetches:
                return False
            fetch = self._fetches[0]
            digest = fetch.hashes[fetch.arrived]
        tier_name, buffer = self.host.name, self.host.pin(digest)
        if buffer is None:
            reserved = self.host.reserve(digest)
            if reserved is None:
                return False  # buffers are released when plans have run
            found_in = self._bring(digest, reserved, fetch.hashes[fetch.arrived + 1 :])
            tier_name, buffer = (found_in, reserved) if found_in is not None else ("", None)
        with self._lock:
            wanted = not fetch.ended
            if wanted and buffer is not None:
                fetch.ready.append(Arrival(digest, buffer, tier_name))
                fetch.arrived += 1
            if wanted and (buffer is None or fetch.arrived == len(fetch.hashes)):
                fetch.ended = True
                self._fetches.remove(fetch)
        if buffer is not None and not wanted:
            self.host.unpin(digest)
        self._news.set()
        return True

    def _bring(self, digest: bytes, room: memoryview, rest: Sequence[bytes]) -> str | None:
        """Load the block from the first lower tier that has it, and return the tier's name, or None.

        A tier whose copy is damaged discards the rest of the prefix too, so that it is written again: it may be damaged
        as well, and would otherwise not be checked before the next restart.
        """
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
        """Write one queued block to the lower tiers that lack it. Return False if the queue is empty."""
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

    # -- shutdown and statistics --------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Wait until all queued blocks are written; return False after the timeout."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
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
        """Return the statistics of each tier, by its name."""
        stats_by_tier = {tier.name: tier.stats() for tier in (self.host, *self.below)}
        for name, stats in stats_by_tier.items():
            stats.hit_tokens = self._hit_tokens[name]
            stats.dropped_blocks += self._dropped["host" if name == self.host.name else "below"]
        host = stats_by_tier[self.host.name]
        host.loaded_blocks += self._hit_blocks[self.host.name]
        host.loaded_bytes = host.loaded_blocks * self.host.buffer_bytes
        return stats_by_tier
