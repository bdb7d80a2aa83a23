"""RemoteTier: keeps KV blocks in Mooncake's Store, memory that all workers of a cluster share.

Every worker contributes part of the memory. A block that one worker computed can be loaded by every other worker. The
key of a block in the store consists of the hash of the cache's layout and the block hash.

Only the store knows which blocks it holds, and asking takes a network call. So `lookup_optimistic` assumes that the
store holds every block, except those that were missing a few seconds ago, and a load ends at the first missing block.
After a failure the tier is off. Then only `refresh` asks the store, and turns the tier on again when the store answers.
So requests wait at most once for a store that is down.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from emberline.core.clock import Clock, SystemClock
from emberline.core.events import TierStats
from emberline.kv.checksum import Crc, select_crc
from emberline.kv.codec import KVCodec
from emberline.kv.tiers.base import PAGE_BYTES, buffer_bytes_for
from emberline.kv.tiers.blockformat import BlockFormat, layout_hash
from emberline.kv.tiers.coding_gain import BlockReadTiming, CompressionGainEstimator
from emberline.kv.tiers.storeclient import (
    NO_MEMORY,
    NOT_FOUND,
    NOT_READY,
    StoreClient,
    StoreListenAddress,
    StoreUnavailable,
)

log = logging.getLogger("emberline.kv")

RETRY_MISSING_AFTER_S = 5.0  # a missing block is not queried again for this time
MAX_REMEMBERED_BLOCKS = 1 << 16  # in the store, and as many that are missing


class RemoteTier:
    name = "store"

    def __init__(
        self,
        master: str,
        layout: str,
        block_bytes: int,
        memory_bytes: int,
        listen_address: StoreListenAddress | None = None,
        *,
        crc: Crc | None = None,
        codec: KVCodec | None = None,
        codec_choice: str = "auto",
        clock: Clock | None = None,
        client: StoreClient | None = None,
    ) -> None:
        """Create the tier; `refresh` connects it to the store.

        `master` is the HOST:PORT of the store's master process. This worker contributes `memory_bytes` to the store.
        `codec_choice` is how new blocks are stored: "uw" (compressed), "none", or "auto" (whichever loads faster).
        """
        digest = layout_hash(layout)
        self._format = BlockFormat(digest, buffer_bytes_for(block_bytes), crc or select_crc(None), codec)
        self._coding, self._gain = codec_choice, CompressionGainEstimator(self._format.buffer_bytes)
        self._key_prefix = digest.hex()
        self._clock = clock or SystemClock()
        self._client = client or StoreClient(master, memory_bytes, self._format.scratch_bytes, listen_address)
        self._load_lock = threading.Lock()  # guards the value that the client returned last
        self._lock = threading.Lock()  # guards everything below
        self._is_on = False
        self._warned = False
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._missing: OrderedDict[bytes, float] = OrderedDict()  # time of the query that missed, by hash
        self._stats = TierStats(on=False, capacity=memory_bytes // self._format.uncompressed_bytes)
        self.refresh()

    # -- the Tier interface ------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        with self._lock:
            return next((i for i, digest in enumerate(hashes) if digest not in self._known), len(hashes))

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        with self._lock:
            if not self._is_on:
                return 0
            since = self._clock.now() - RETRY_MISSING_AFTER_S
            missing = (i for i, digest in enumerate(hashes) if self._missing.get(digest, since) > since)
            return next(missing, len(hashes))

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        pairs = zip(hashes, buffers, strict=True)
        with self._load_lock:
            return next((i for i, pair in enumerate(pairs) if not self._load_block(*pair)), len(hashes))

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        return sum(self._store_block(*pair) for pair in zip(hashes, buffers, strict=True))

    def discard(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._remember_presence(digest, present=False)
            if self._is_on:
                with contextlib.suppress(StoreUnavailable):
                    self._client.remove(self._store_key(digest))

    def refresh(self) -> None:
        if self._is_on:
            return
        try:
            self._client.ensure_running()
        except StoreUnavailable as error:
            self._turn_off(error)
            return
        with self._lock:
            self._is_on, was_off, self._warned = True, self._warned, False
        if was_off:
            log.warning("KV store tier turned on again: key_prefix=%s", self._key_prefix)

    def stats(self) -> TierStats:
        with self._lock:
            self._stats.blocks, self._stats.on = len(self._known), self._is_on
            return self._stats.copy()

    def close(self) -> None:
        with self._lock:
            self._is_on = False
        with contextlib.suppress(StoreUnavailable):
            self._client.close()

    # -- one block ---------------------------------------------------------------------------------------------------

    def _load_block(self, block_hash: bytes, buffer: memoryview) -> bool:
        if not self._is_on:
            return False
        began = time.perf_counter()
        try:
            value = self._client.get(self._store_key(block_hash))
        except StoreUnavailable as error:
            self._turn_off(error)
            return False
        if isinstance(value, int):
            self._remember_presence(block_hash, present=False)
            with self._lock:
                self._stats.errors += value not in (NOT_FOUND, NOT_READY)
            return False
        seconds, size = time.perf_counter() - began, len(value)
        intact = size > PAGE_BYTES and self._format.read(block_hash, value[:PAGE_BYTES], value[PAGE_BYTES:], buffer)
        if not intact:
            self.discard([block_hash])
            with self._lock:
                self._stats.damaged_blocks += 1
            return False
        decoding = 0.0 if size == self._format.uncompressed_bytes else time.perf_counter() - began - seconds
        self._remember_presence(block_hash, present=True)
        with self._lock:
            self._gain.record_read(BlockReadTiming(size, seconds, decoding))
            self._stats.loaded_blocks += 1
            self._stats.loaded_bytes += size
            self._stats.load_seconds += time.perf_counter() - began
        return True

    def _store_block(self, block_hash: bytes, buffer: memoryview) -> bool:
        began, result, size = time.perf_counter(), NO_MEMORY, 0
        if self._is_on:
            try:
                result, size = self._client.put(
                    self._store_key(block_hash), lambda target: self._write_value(block_hash, buffer, target)
                )
            except StoreUnavailable as error:
                self._turn_off(error)
        if result == 0:
            self._remember_presence(block_hash, present=True)
        with self._lock:
            self._stats.dropped_blocks += result == NO_MEMORY
            self._stats.errors += result not in (0, NO_MEMORY)
            if result == 0:
                self._stats.stored_blocks += 1
                self._stats.stored_bytes += size
                self._stats.store_seconds += time.perf_counter() - began
        return result == 0

    def _write_value(self, block_hash: bytes, buffer: memoryview, target: memoryview) -> int:
        coded = self._coding == "uw" or (self._coding == "auto" and self._gain.is_encoding_faster())
        payload = self._format.write(block_hash, buffer, target, encode=coded, max_encoded_bytes=len(buffer) * 31 // 32)
        if payload is buffer:
            target[PAGE_BYTES : PAGE_BYTES + len(buffer)] = buffer
        return PAGE_BYTES + len(payload)

    def _store_key(self, block_hash: bytes) -> str:
        return f"{self._key_prefix}/{block_hash.hex()}"

    # -- known and missing blocks, failures --------------------------------------------------------------------------

    def _remember_presence(self, block_hash: bytes, *, present: bool) -> None:
        with self._lock:
            self._known.pop(block_hash, None)
            self._missing.pop(block_hash, None)
            if present:
                self._known[block_hash] = None
            else:
                self._missing[block_hash] = self._clock.now()
            for remembered in (self._known, self._missing):
                if len(remembered) > MAX_REMEMBERED_BLOCKS:
                    remembered.popitem(last=False)

    def _turn_off(self, error: StoreUnavailable) -> None:
        """Turn the tier off and forget which blocks the store holds, because they may be gone when it answers again."""
        with self._lock:
            self._is_on = False
            self._known.clear()
            self._missing.clear()
            self._stats.errors += 1
            first, self._warned = not self._warned, True
        if first:
            log.warning("KV store tier turned off, retrying periodically: reason=%s", error)
