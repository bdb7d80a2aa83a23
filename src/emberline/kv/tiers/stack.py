"""TierStack: all tiers of a KV cache behind one interface.

Host memory is the first tier, and every block passes through it. The tiers below it are disk and the shared store.

    main cache <--copies in step plans--> host buffers <--a reader and a writer thread--> lower tiers

To store a block, the next step plan copies it to a host buffer, and the writer thread copies it from there to the lower
tiers. The writer's queue is limited, and blocks that do not fit into the queue are dropped.

To load blocks, a TierFetch delivers pinned host buffers in the order of the prefix: first the blocks that are in host
memory, then the others when the reader thread has loaded them. Loaded blocks stay in host memory for later requests.
The engine's loop never waits here. A failed load only ends its fetch early.
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

MAX_QUEUED_WRITES = 256  # blocks; also limited to half of the host buffers
REFRESH_INTERVAL_S = 5.0
STUCK_READ_S = 1.0  # while one block takes longer to read, lower tiers are not used for new requests


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A loaded block in a host buffer, which stays pinned until TierStack.release_fetched."""

    block_hash: bytes
    buffer: memoryview
    tier: str  # name of the tier that held it


@dataclass(slots=True, eq=False)
class TierFetch:
    """The leading blocks of a prefix that are being loaded into host buffers. Guarded by the lock of TierStack."""

    hashes: Sequence[bytes]
    num_fetched: int = 0
    ready: list[FetchedBlock] = field(default_factory=list)
    ended: bool = False  # complete, failed or cancelled


class TierStack:
    def __init__(
        self,
        host: HostTier,
        lower_tiers: Sequence[Tier] = (),
        *,
        clock: Clock | None = None,
        threads: bool = True,
        snapshot_blocks: int = 0,
    ) -> None:
        """Create the stack and start its threads. `snapshot_blocks`: pages of a snapshot of recurrent states.

        With `threads` False, blocks move only when `load_next_block` or `write_next_block` is called, as tests do.
        """
        self.host = host
        self.lower_tiers = list(lower_tiers)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._fetches: deque[TierFetch] = deque()  # with blocks left for the reader
        self._writes: dict[bytes, memoryview] = {}  # queue of the writer, in order; the buffers are pinned
        # A snapshot is written whole or not at all, so at least two fit into the queue.
        self._max_queued_writes = min(max(MAX_QUEUED_WRITES, 2 * snapshot_blocks), host.capacity // 2)
        self._dropped = {"host": 0, "below": 0}
        self._reading_since: float | None = None
        self._hit_tokens = {tier.name: 0 for tier in (host, *self.lower_tiers)}
        self._hit_blocks = dict(self._hit_tokens)
        self._read_event, self._write_event = threading.Event(), threading.Event()
        self._progress_event = threading.Event()
        self._closed = False
        loops = (self._read_loop, self._write_loop) if threads and self.lower_tiers else ()
        self._threads = [threading.Thread(target=loop, daemon=True, name=loop.__name__) for loop in loops]
        for thread in self._threads:
            thread.start()

    # -- loads: called by the engine's loop ---------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes], *, guess: bool = True) -> int:
        """Return how many leading blocks of the hash chain are worth loading or, without `guess`, certainly in tiers.

        Different tiers may hold different blocks of the chain.
        """
        tiers: list[Tier] = [self.host, *(() if self._is_reader_stuck() else self.lower_tiers)]
        lookups = [tier.lookup_optimistic if guess else tier.lookup for tier in tiers]
        count = 0
        while count < len(hashes) and (more := max(lookup(hashes[count:]) for lookup in lookups)):
            count += more
        return count

    def start_fetch(self, hashes: Sequence[bytes]) -> TierFetch:
        fetch = TierFetch(hashes)
        for digest in hashes:
            buffer = self.host.pin_block(digest)
            if buffer is None:
                break
            fetch.ready.append(FetchedBlock(digest, buffer, self.host.name))
        fetch.num_fetched = len(fetch.ready)
        with self._lock:
            fetch.ended = fetch.num_fetched == len(hashes) or not self.lower_tiers
            if not fetch.ended:
                self._fetches.append(fetch)
        self._read_event.set()
        return fetch

    def take_fetched(self, fetch: TierFetch) -> tuple[list[FetchedBlock], bool]:
        """Return the blocks that were loaded since the last call, and whether the fetch has ended."""
        with self._lock:
            arrivals, fetch.ready = fetch.ready, []
            return arrivals, fetch.ended

    def release_fetched(self, block_hash: bytes) -> None:
        """Unpin the buffer of a fetched block."""
        self.host.unpin_block(block_hash)
        self._read_event.set()

    def cancel_fetch(self, fetch: TierFetch) -> None:
        with self._lock:
            arrivals, fetch.ready, fetch.ended = fetch.ready, [], True
            if fetch in self._fetches:
                self._fetches.remove(fetch)
        for arrival in arrivals:
            self.release_fetched(arrival.block_hash)

    def record_hit(self, tier_name: str, tokens: int) -> None:
        """Count one block of `tokens` tokens that a request got from a tier, for the statistics."""
        self._hit_tokens[tier_name] += tokens
        self._hit_blocks[tier_name] += 1

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until a block has been loaded or a fetch has ended, at most `timeout_s`."""
        self._progress_event.wait(timeout_s)
        self._progress_event.clear()

    # -- stores: called by the engine's loop --------------------------------------------------------------------------

    def reserve_host_buffer(self, block_hash: bytes) -> memoryview | None:
        """Return a host buffer to copy the block to.

        Return None if host memory already has the block, or if no buffer is free.
        """
        buffer = self.host.reserve_buffer(block_hash)
        if buffer is None and block_hash in self.host:
            self._queue_write(block_hash)  # the lower tiers may not have it
        elif buffer is None:
            self._dropped["host"] += 1
        return buffer

    def finish_save(self, block_hash: bytes) -> None:
        """Make a filled host buffer available to lookups, and queue the block for the lower tiers."""
        self.host.publish_buffer(block_hash)
        self._queue_write(block_hash)
        self._read_event.set()

    def _queue_write(self, block_hash: bytes) -> None:
        if all(tier.lookup([block_hash]) for tier in self.lower_tiers):
            return
        with self._lock:
            if block_hash in self._writes:
                return
            if len(self._writes) >= self._max_queued_writes:
                self._dropped["below"] += 1
            elif (buffer := self.host.pin_block(block_hash)) is not None:
                self._writes[block_hash] = buffer
        self._write_event.set()

    # -- run by the threads -------------------------------------------------------------------------------------------

    def load_next_block(self) -> bool:
        """Load one block into host memory. Return False if no fetch needs a block, or if no buffer is free."""
        with self._lock:
            if not self._fetches:
                return False
            fetch = self._fetches[0]
            digest = fetch.hashes[fetch.num_fetched]
        tier_name, buffer = self.host.name, self.host.pin_block(digest)
        if buffer is None:
            reserved = self.host.reserve_buffer(digest)
            if reserved is None:
                return False  # buffers are released when plans have run
            found_in = self._load_block(digest, reserved, fetch.hashes[fetch.num_fetched + 1 :])
            tier_name, buffer = (found_in, reserved) if found_in is not None else ("", None)
        with self._lock:
            wanted = not fetch.ended
            if wanted and buffer is not None:
                fetch.ready.append(FetchedBlock(digest, buffer, tier_name))
                fetch.num_fetched += 1
            if wanted and (buffer is None or fetch.num_fetched == len(fetch.hashes)):
                fetch.ended = True
                self._fetches.remove(fetch)
        if buffer is not None and not wanted:
            self.host.unpin_block(digest)
        self._progress_event.set()
        return True

    def _load_block(self, block_hash: bytes, buffer: memoryview, following_hashes: Sequence[bytes]) -> str | None:
        """Load the block from the first lower tier that has it. Return the tier's name, or None.

        If a tier's copy of the block is damaged, the tier also discards the following blocks of the prefix, because
        they may be damaged too. They will then be written again.
        """
        self._reading_since = self._clock.now()
        for tier in self.lower_tiers:
            damaged = tier.stats().damaged_blocks
            if tier.load([block_hash], [buffer]):
                self.host.publish_buffer(block_hash, pin=True)
                self._reading_since = None
                return tier.name
            if tier.stats().damaged_blocks > damaged:
                tier.discard(following_hashes)
        self.host.release_reserved_buffer(block_hash)
        self._reading_since = None
        return None

    def write_next_block(self) -> bool:
        """Write one queued block to the lower tiers that do not have it. Return False if the queue is empty."""
        with self._lock:
            if not self._writes:
                return False
            digest, buffer = next(iter(self._writes.items()))
        for tier in self.lower_tiers:
            if not tier.lookup([digest]):
                tier.store([digest], [buffer])
        with self._lock:
            del self._writes[digest]
        self.host.unpin_block(digest)
        self._read_event.set()
        return True

    def _is_reader_stuck(self) -> bool:
        since = self._reading_since
        return since is not None and self._clock.now() - since > STUCK_READ_S

    def _read_loop(self) -> None:
        self._run_loop(self._read_event, self.load_next_block)

    def _write_loop(self) -> None:
        refreshed = self._clock.now()

        def refresh_or_write() -> bool:
            nonlocal refreshed
            if self._clock.now() - refreshed > REFRESH_INTERVAL_S:
                for tier in self.lower_tiers:
                    tier.refresh()
                refreshed = self._clock.now()
            return self.write_next_block()

        self._run_loop(self._write_event, refresh_or_write)

    def _run_loop(self, wake_event: threading.Event, work: Callable[[], bool]) -> None:
        while not self._closed:
            wake_event.wait(REFRESH_INTERVAL_S)
            wake_event.clear()
            while not self._closed and work():
                pass

    # -- shutdown and statistics --------------------------------------------------------------------------------------

    def wait_until_written(self, timeout_s: float) -> bool:
        """Wait until all queued blocks are written. Return False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._writes:
                    return True
            time.sleep(0.002)
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        if self._threads:
            self.wait_until_written(timeout_s)
        self._closed = True
        self._read_event.set()
        self._write_event.set()
        for thread in self._threads:
            thread.join(timeout_s)
        for tier in (*self.lower_tiers, self.host):
            tier.close()

    def stats(self) -> dict[str, TierStats]:
        """Return the statistics of each tier, by its name."""
        stats_by_tier = {tier.name: tier.stats() for tier in (self.host, *self.lower_tiers)}
        for name, stats in stats_by_tier.items():
            stats.hit_tokens = self._hit_tokens[name]
            stats.dropped_blocks += self._dropped["host" if name == self.host.name else "below"]
        host = stats_by_tier[self.host.name]
        host.loaded_blocks += self._hit_blocks[self.host.name]
        host.loaded_bytes = host.loaded_blocks * self.host.buffer_bytes
        return stats_by_tier
