"""HostTier: keeps KV blocks in main memory, in page-aligned buffers.

All buffers lie in one memory allocation, which a GPU driver can page-lock. A buffer is free, being filled, or holds a
block. Lookups do not find a buffer that is being filled. A block can be pinned, and is then not evicted. So the bytes
of a buffer never change while they are read. All methods are thread-safe.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

from emberline.core.errors import InvalidRequest
from emberline.core.events import TierStats
from emberline.kv.tiers.base import buffer_bytes_for
from emberline.kv.tiers.policy import make_eviction_policy

MIN_BUFFERS = 2  # one to fill, one to read


class HostTier:
    name = "host"

    def __init__(
        self,
        block_bytes: int,
        memory_bytes: int,
        policy: str = "lru",
        *,
        min_buffers: int = MIN_BUFFERS,
        allocate: Callable[[int, int], memoryview] | None = None,
    ) -> None:
        """Allocate the buffers. Raises InvalidRequest if there is memory for fewer than `min_buffers`.

        `allocate` takes the size of a buffer in bytes and the number of buffers, and returns memory for all of them.
        None: private memory of this process."""
        self.buffer_bytes = buffer_bytes_for(block_bytes)
        self.capacity = memory_bytes // self.buffer_bytes
        if self.capacity < min_buffers:
            raise InvalidRequest(
                f"kv_host_memory is {memory_bytes} bytes, which hold {self.capacity} KV blocks of {self.buffer_bytes} "
                f"bytes; at least {min_buffers} are needed",
                param="kv_host_memory",
                hint=f"raise --kv-host-memory to at least {min_buffers * self.buffer_bytes} bytes",
            )
        self.memory = (allocate or _allocate_private)(self.buffer_bytes, self.capacity)
        self.on_close: Callable[[], None] = lambda: None  # set by a GPU engine, to unpin the area
        self._free = list(range(self.capacity - 1, -1, -1))
        self._filling: dict[bytes, int] = {}
        self._kept: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
        self._policy = make_eviction_policy(policy, self.capacity)
        self._lock = threading.Lock()
        self._num_stored = self._num_loaded = self._num_evicted = 0

    # -- buffers: reserve, publish, pin ------------------------------------------------------------------------------

    def reserve_buffer(self, block_hash: bytes) -> memoryview | None:
        """Return a buffer to fill with this block.

        Return None if the block is already stored or being filled, or if no buffer can be freed.
        """
        with self._lock:
            if block_hash in self._kept or block_hash in self._filling:
                return None
            if not self._free and not self._evict_to_fit(block_hash):
                return None
            slot = self._filling[block_hash] = self._free.pop()
            return self._buffer_at(slot)

    def publish_buffer(self, block_hash: bytes, *, pin: bool = False) -> None:
        """Make the filled buffer visible to lookups. With `pin`, it is not evicted until `unpin_block`."""
        with self._lock:
            self._kept[block_hash] = self._filling.pop(block_hash)
            self._policy.insert(block_hash)
            self._num_stored += 1
            if pin:
                self._pins[block_hash] = 1

    def release_reserved_buffer(self, block_hash: bytes) -> None:
        """Free a reserved buffer that could not be filled."""
        with self._lock:
            self._free.append(self._filling.pop(block_hash))

    def pin_block(self, block_hash: bytes) -> memoryview | None:
        """Return the buffer of a stored block and keep it from eviction until `unpin_block`.

        Return None if the block is not stored.
        """
        with self._lock:
            slot = self._kept.get(block_hash)
            if slot is None:
                return None
            self._policy.record_use(block_hash)
            self._pins[block_hash] = self._pins.get(block_hash, 0) + 1
            return self._buffer_at(slot)

    def unpin_block(self, block_hash: bytes) -> None:
        with self._lock:
            count = self._pins.pop(block_hash) - 1
            if count:
                self._pins[block_hash] = count

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether the block is stored or being filled."""
        with self._lock:
            return block_hash in self._kept or block_hash in self._filling

    # -- the Tier interface ------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        with self._lock:
            return next((i for i, digest in enumerate(hashes) if digest not in self._kept), len(hashes))

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes)

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        for i, (digest, buffer) in enumerate(zip(hashes, buffers, strict=True)):
            kept = self.pin_block(digest)
            if kept is None:
                return i
            buffer[:] = kept
            self.unpin_block(digest)
            with self._lock:
                self._num_loaded += 1
        return len(hashes)

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        count = 0
        for digest, buffer in zip(hashes, buffers, strict=True):
            if (target := self.reserve_buffer(digest)) is not None:
                target[:] = buffer
                self.publish_buffer(digest)
                count += 1
        return count

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Remove the blocks, except pinned blocks, which are being read."""
        with self._lock:
            for digest in hashes:
                if digest in self._kept and digest not in self._pins:
                    self._policy.remove(digest)
                    self._free.append(self._kept.pop(digest))

    def refresh(self) -> None:
        """Do nothing, because no other process shares this memory."""

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                blocks=len(self._kept),
                capacity=self.capacity,
                loaded_blocks=self._num_loaded,
                loaded_bytes=self._num_loaded * self.buffer_bytes,
                stored_blocks=self._num_stored,
                stored_bytes=self._num_stored * self.buffer_bytes,
                evicted_blocks=self._num_evicted,
            )

    def close(self) -> None:
        self.on_close()

    def check_invariants(self) -> None:
        """Assert that every buffer is free, being filled or stored, and that only stored blocks are pinned."""
        with self._lock:
            slots = [*self._free, *self._filling.values(), *self._kept.values()]
            assert sorted(slots) == list(range(self.capacity))
            assert self._pins.keys() <= self._kept.keys() and all(count > 0 for count in self._pins.values())
            assert set(self._policy) == self._kept.keys()

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return len(self._pins) + len(self._filling)

    def _evict_to_fit(self, incoming_hash: bytes) -> bool:
        digest = self._policy.evict(incoming_hash, lambda key: key not in self._pins)
        if digest is None:
            return False
        self._free.append(self._kept.pop(digest))
        self._num_evicted += 1
        return True

    def _buffer_at(self, slot: int) -> memoryview:
        return self.memory[slot * self.buffer_bytes : (slot + 1) * self.buffer_bytes]


def _allocate_private(buffer_bytes: int, count: int) -> memoryview:
    return memoryview(mmap.mmap(-1, buffer_bytes * count))  # its pages use no memory until they are written
