"""DiskTier: keeps KV blocks on disk, one file per block, at DIR/LAYOUT/XX/HASH.

After a restart the blocks are found by their file names. One large file for many blocks would be faster
(`bench/tiers.py` measures both), but would need compaction, an index that survives a crash, and a lock between
processes. Separate files need none of these, and loading a block is many times faster than computing it either way.

Several processes may share a directory. A reader never gets a damaged or a wrong block: a file is complete or absent,
and its name, length and checksums are checked. A block that one process evicts is missing for the others. Other
processes see a new block only after their next `refresh`. Each process applies the quota to the files that it knows, so
together they may exceed it by what they write between two refreshes.

With a codec, blocks are stored compressed always, never, or if they load faster that way (`coding_gain.py`). Existing
blocks are read in either form. The quota counts bytes, so more blocks fit when they are compressed.

If the disk is full, blocks are evicted before the quota is reached. If that does not help, no blocks are stored for a
while, but loads continue. A deleted directory is created again, unless its file system was unmounted. Any other I/O
error turns the tier off for a while. Each of these events is logged once and fails no request.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from emberline.core.clock import Clock, SystemClock
from emberline.core.errors import InvalidRequest
from emberline.core.events import TierStats
from emberline.kv.checksum import Crc, select_crc
from emberline.kv.codec import KVCodec
from emberline.kv.tiers.base import buffer_bytes_for
from emberline.kv.tiers.blockfile import BlockFileIO
from emberline.kv.tiers.blockformat import BlockFormat, layout_hash
from emberline.kv.tiers.coding_gain import CompressionGainEstimator
from emberline.kv.tiers.policy import make_eviction_policy

log = logging.getLogger("emberline.kv")

RETRY_INTERVAL_S = 30.0  # after an error the disk is not used for this time
STALE_FILE_S = 600.0  # age at which an unfinished temporary file is deleted
TEMPORARY_SUFFIX = ".part"
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
MAX_EVICTIONS_PER_WRITE = 8  # on a full disk, where other programs may take the freed space


class DiskTier:
    name = "disk"

    def __init__(
        self,
        directory: Path,
        layout: str,
        block_bytes: int,
        quota_bytes: int,
        *,
        policy: str = "lru",
        crc: Crc | None = None,
        codec: KVCodec | None = None,
        codec_choice: str = "auto",
        clock: Clock | None = None,
    ) -> None:
        """Open or create the directory and index its blocks.

        `codec_choice` is how new blocks are stored: "uw" (compressed), "none", or "auto" (whichever loads faster).
        Raises InvalidRequest if the quota is too small for one block or the directory cannot be used.
        """
        digest = layout_hash(layout)
        form = BlockFormat(digest, buffer_bytes_for(block_bytes), crc or select_crc(None), codec)
        self._files = BlockFileIO(form)
        self._coding, self._gain = codec_choice, CompressionGainEstimator(form.buffer_bytes)
        self._quota_bytes = quota_bytes
        self.capacity = quota_bytes // form.uncompressed_bytes  # in plain blocks
        if self.capacity < 1:
            raise InvalidRequest(
                f"kv_disk_size is {quota_bytes} bytes, but one KV block of this model needs {form.uncompressed_bytes}",
                param="kv_disk_size",
                hint="raise --kv-disk-size",
            )
        self._root = directory / digest.hex()
        self._clock = clock or SystemClock()
        self._policy = make_eviction_policy(policy, self.capacity)
        self._lock = threading.Lock()  # guards everything below; not held while files are read or written
        self._sizes: dict[bytes, int] = {}  # file length of each block in the policy
        self._used_bytes = 0  # sum of these
        self._folder_mtimes: dict[str, int] = {}  # modification time in ns of each folder at the last scan
        self._off_until = float("-inf")
        self._is_off = False
        self._is_full = False  # whether the last write found the disk full
        self._stores_off_until = float("-inf")  # later than now on a full disk
        self._num_writes = 0
        self._stats = TierStats(capacity=self.capacity)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._device = self._root.stat().st_dev
            self._scan_changed_folders()
        except OSError as e:
            hint = "set --kv-disk to a directory that this user may write to"
            message = f"KV disk directory {directory} cannot be used: {e.strerror or e}"
            raise InvalidRequest(message, param="kv_disk", hint=hint) from e

    @property
    def uses_direct_io(self) -> bool:
        return self._files.uses_direct_io

    # -- the Tier interface ------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        with self._lock:
            if self._clock.now() < self._off_until:
                return 0
            return next((i for i, digest in enumerate(hashes) if digest not in self._policy), len(hashes))

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes)

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        pairs = zip(hashes, buffers, strict=True)
        return next((i for i, pair in enumerate(pairs) if not self._load_block(*pair)), len(hashes))

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        return sum(self._store_block(*pair) for pair in zip(hashes, buffers, strict=True))

    def discard(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._remove_entry(digest)
            self._delete_file(digest)

    def refresh(self) -> None:
        if not self._is_paused():
            try:
                self._scan_changed_folders()
            except OSError as e:
                self._turn_off(e)

    def stats(self) -> TierStats:
        with self._lock:
            self._stats.blocks = len(self._policy)
            self._stats.capacity = (
                self._quota_bytes * len(self._policy) // self._used_bytes if self._used_bytes else self.capacity
            )
            self._stats.on = not self._is_off
            return self._stats.copy()

    def close(self) -> None:
        """Do nothing, because the tier keeps no file open."""

    # -- one block ---------------------------------------------------------------------------------------------------

    def _load_block(self, block_hash: bytes, buffer: memoryview) -> bool:
        if self._is_paused():
            return False
        began = time.perf_counter()
        try:
            found = self._files.read(self._block_path(block_hash), block_hash, buffer)
        except FileNotFoundError:  # another process evicted it
            self._remove_entry(block_hash)
            return False
        except OSError as e:
            self._remove_entry(block_hash)
            self._turn_off(e)
            return False
        if found is None:
            self._remove_entry(block_hash)
            self._delete_file(block_hash)
        with self._lock:
            if found is None:
                self._stats.damaged_blocks += 1
                return False
            if block_hash in self._policy:
                self._policy.record_use(block_hash)
            self._gain.record_read(found)
            self._stats.loaded_blocks += 1
            self._stats.loaded_bytes += found.stored_bytes
            self._stats.load_seconds += time.perf_counter() - began
        self._turn_on()
        return True

    def _store_block(self, block_hash: bytes, buffer: memoryview) -> bool:
        began = time.perf_counter()
        paused = self._is_paused() or self._clock.now() < self._stores_off_until
        size = None if paused else self._write_block(block_hash, buffer)
        if size is None:
            with self._lock:
                self._stats.dropped_blocks += 1
            return False
        with self._lock:
            self._add_entry(block_hash, size)
            self._stats.stored_blocks += 1
            self._stats.stored_bytes += size
            self._stats.store_seconds += time.perf_counter() - began
        self._turn_on()
        return True

    def _write_block(self, block_hash: bytes, buffer: memoryview) -> int | None:
        """Write the block and return the length of its file, or None after an error or if the disk stays full."""
        for evicted in range(1 + MAX_EVICTIONS_PER_WRITE):
            try:
                size = self._try_write_block(block_hash, buffer)
            except OSError as e:
                if e.errno not in DISK_FULL_ERRNOS:
                    self._turn_off(e)
                    return None
                self._record_full_disk(e)
                if evicted == MAX_EVICTIONS_PER_WRITE or not self._evict_block(block_hash):
                    break
            else:
                self._is_full = evicted > 0
                return size
        self._stores_off_until = self._clock.now() + RETRY_INTERVAL_S
        return None

    def _try_write_block(self, block_hash: bytes, buffer: memoryview) -> int:
        path = self._block_path(block_hash)
        self._make_folder(path.parent)  # before evicting: a deleted directory has nothing left to evict
        spare = self._evict_to_fit(block_hash, self._files.format.uncompressed_bytes)
        self._num_writes += 1
        temporary = path.with_name(f"{os.getpid()}-{threading.get_ident()}-{self._num_writes}{TEMPORARY_SUFFIX}")
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):  # another process took it first
                os.utime(spare, follow_symlinks=False)  # otherwise it could count as stale
                spare.rename(temporary)
        coded = self._coding == "uw" or (self._coding == "auto" and self._gain.is_encoding_faster())
        return self._files.write(path, temporary, block_hash, buffer, encode=coded)

    def _evict_block(self, incoming_hash: bytes) -> bool:
        """Remove the block that the eviction policy chooses. Return False if there is none to remove."""
        with self._lock:
            evicted = self._policy.evict(incoming_hash, lambda key: True) if len(self._policy) else None
            if evicted is None:
                return False
            self._used_bytes -= self._sizes.pop(evicted)
            self._stats.evicted_blocks += 1
        self._delete_file(evicted)
        return True

    def _evict_to_fit(self, incoming_hash: bytes, size: int) -> Path | None:
        """Evict blocks until `size` more bytes fit into the quota.

        Return the file of the last evicted block, which the caller overwrites or deletes, or None.
        """
        spare: bytes | None = None
        while True:
            with self._lock:
                if incoming_hash in self._policy or self._used_bytes + size <= self._quota_bytes:
                    return self._block_path(spare) if spare is not None else None
                evicted = self._policy.evict(incoming_hash, lambda key: True)
                assert evicted is not None
                self._used_bytes -= self._sizes.pop(evicted)
                self._stats.evicted_blocks += 1
            if spare is not None:
                self._delete_file(spare)
            spare = evicted

    def _remove_entry(self, block_hash: bytes) -> None:
        with self._lock:
            if block_hash in self._policy:
                self._policy.remove(block_hash)
                self._used_bytes -= self._sizes.pop(block_hash)

    def _add_entry(self, block_hash: bytes, size: int) -> None:
        """Add a block to the index, or update it. The caller must hold the lock."""
        if block_hash not in self._policy:
            self._policy.insert(block_hash)
        self._used_bytes += size - self._sizes.get(block_hash, 0)
        self._sizes[block_hash] = size

    def _delete_file(self, block_hash: bytes) -> None:
        with contextlib.suppress(OSError):
            self._block_path(block_hash).unlink()

    def _block_path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._root / name[:2] / name

    # -- the directory -----------------------------------------------------------------------------------------------

    def _scan_changed_folders(self) -> None:
        """Index the files of the folders that changed since the last scan, least recently used files first."""
        listed: dict[str, dict[bytes, tuple[float, int]]] = {}
        seen: dict[str, int] = {}  # applied at the end: reading one folder may fail, and the scan is then repeated
        entries = self._list_folders()
        for folder in entries:
            changed = folder.stat().st_mtime_ns if folder.is_dir() else None
            if changed is not None and self._folder_mtimes.get(folder.name) != changed:
                seen[folder.name] = changed
                listed[folder.name] = self._list_blocks(Path(folder.path))
        empty: dict[bytes, tuple[float, int]] = {}
        names = {folder.name for folder in entries}
        listed |= {name: empty for name in self._folder_mtimes if name not in names}  # folders that were deleted
        self._folder_mtimes = {name: changed for name, changed in self._folder_mtimes.items() if name in names}
        with self._lock:
            removed = [key for key in self._policy if key not in listed.get(key.hex()[:2], (key,))]
        for digest in removed:
            if not self._block_path(digest).exists():  # and not written since
                self._remove_entry(digest)
        for (_, size), digest in sorted(
            (found, digest) for entries in listed.values() for digest, found in entries.items()
        ):
            with self._lock:
                if digest in self._policy:
                    continue
            if (spare := self._evict_to_fit(digest, size)) is not None:
                spare.unlink(missing_ok=True)
            with self._lock:
                self._add_entry(digest, size)
        self._folder_mtimes |= seen

    def _list_folders(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root) as found:
                return list(found)
        except FileNotFoundError:
            self._recreate_directory()
            return []

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            self._recreate_directory()
            folder.mkdir(exist_ok=True)

    def _recreate_directory(self) -> None:
        """Create the tier's directory again after it was deleted.

        Raises OSError if its file system was unmounted. The blocks would otherwise fill the file system below the mount
        point.
        """
        nearest = next(folder for folder in self._root.parents if folder.exists())
        if nearest.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, "the file system of the KV disk directory is not mounted", str(self._root))
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            removed = list(self._policy)
        for digest in removed:
            self._remove_entry(digest)
        self._folder_mtimes = {}
        log.warning("KV disk directory was deleted, created again: path=%s blocks_lost=%d", self._root, len(removed))

    def _list_blocks(self, folder: Path) -> dict[bytes, tuple[float, int]]:
        """Return the time of last use and the length of each block file in the folder.

        Old temporary files, and files whose length no block can have, are deleted. Files with other names are left
        alone.
        """
        blocks: dict[bytes, tuple[float, int]] = {}
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(TEMPORARY_SUFFIX):
                    if time.time() - status.st_mtime > STALE_FILE_S:
                        Path(entry.path).unlink()
                elif (digest := _parse_block_file_name(entry.name)) is not None:
                    if self._files.is_valid_file_length(status.st_size) and entry.name[:2] == folder.name:
                        blocks[digest] = status.st_mtime, status.st_size
                    else:
                        Path(entry.path).unlink()
        return blocks

    # -- errors and recovery -----------------------------------------------------------------------------------------

    def _is_paused(self) -> bool:
        with self._lock:
            return self._clock.now() < self._off_until

    def _turn_off(self, error: OSError) -> None:
        with self._lock:
            first, self._is_off = not self._is_off, True
            self._off_until = self._clock.now() + RETRY_INTERVAL_S
            self._stats.errors += 1
        if first:
            text = "KV disk tier turned off after an I/O error, retrying every %.0f s: path=%s error=%s"
            log.warning(text, RETRY_INTERVAL_S, self._root, error)

    def _record_full_disk(self, error: OSError) -> None:
        with self._lock:
            first, self._is_full = not self._is_full, True
            self._stats.errors += first
        if first:
            log.warning("KV disk is full, evicting blocks early to make space: path=%s error=%s", self._root, error)

    def _turn_on(self) -> None:
        with self._lock:
            was_off, self._is_off = self._is_off, False
        if was_off:
            log.warning("KV disk tier turned on again: path=%s", self._root)


def _parse_block_file_name(name: str) -> bytes | None:
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == 16 and digest.hex() == name else None
