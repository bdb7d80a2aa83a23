"""DiskTier: blocks in files, one each, below DIR/LAYOUT/XX/HASH. A restart finds them again by their names.

One file per block, not packed segments: these are faster (`bench/tiers.py` measures both), but they need compaction,
an index that survives a crash, and a lock between processes; names and renames need none of these, and a block comes
back many times faster than it is computed either way.

Several processes may share a directory. Guaranteed: nobody ever reads a block that is torn or another's (a file is
complete or absent, and names, lengths and checksums are verified); a file that one process evicts is a miss for the
others. Not guaranteed: that a block is seen at once by others (it takes until they `refresh`), and the quota, which
each process holds for what it has seen: together they may exceed it by what they write between two looks.

An I/O error (a full disk too) turns the tier off for a while: one line in the log, requests notice nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from emberline.core.clock import Clock, SystemClock
from emberline.core.errors import InvalidRequest
from emberline.core.events import TierStats
from emberline.kv.checksum import Crc, crc_of
from emberline.kv.tiers.base import buffer_size
from emberline.kv.tiers.blockfile import BlockFiles, layout_hash
from emberline.kv.tiers.policy import policy_of

log = logging.getLogger("emberline.kv")

PAUSE = 30.0  # seconds without the disk after an error; then it is tried again
STALE = 600.0  # seconds after which a file that nobody finished is nobody's
TEMPORARY = ".part"


class DiskTier:
    name = "disk"

    def __init__(
        self,
        directory: Path,
        layout: str,
        block_bytes: int,
        quota: int,
        *,
        policy: str = "lru",
        crc: Crc | None = None,
        clock: Clock | None = None,
    ) -> None:
        digest = layout_hash(layout)
        self._files = BlockFiles(digest, buffer_size(block_bytes), crc or crc_of(None))
        self.capacity = quota // self._files.file_bytes
        if self.capacity < 1:
            raise InvalidRequest(f"{quota} bytes hold no block of {self._files.file_bytes}", param="kv_disk_size")
        self._root = directory / digest.hex()
        self._clock = clock or SystemClock()
        self._policy = policy_of(policy, self.capacity)
        self._lock = threading.Lock()  # of everything below; not held while files are read or written
        self._seen: dict[str, int] = {}  # folders, and when each had last changed
        self._off_until = float("-inf")
        self._off = False
        self._count = 0
        self._stats = TierStats(capacity=self.capacity)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as e:
            hint = "give a directory that this user may write to"
            raise InvalidRequest(f"{directory} cannot be used: {e.strerror or e}", param="kv_disk", hint=hint) from e

    @property
    def direct(self) -> bool:
        """Whether files go around the page cache."""
        return self._files.direct

    # -- as a Tier ---------------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        with self._lock:
            if self._clock.now() < self._off_until:
                return 0
            return next((i for i, digest in enumerate(hashes) if digest not in self._policy), len(hashes))

    def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        pairs = zip(hashes, into, strict=True)
        return next((i for i, pair in enumerate(pairs) if not self._load(*pair)), len(hashes))

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        return sum(self._store(*pair) for pair in zip(hashes, buffers, strict=True))

    def forget(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._drop(digest)
            self._unlink(digest)

    def refresh(self) -> None:
        if not self._resting():
            try:
                self._scan()
            except OSError as e:
                self._fail(e)

    def stats(self) -> TierStats:
        with self._lock:
            self._stats.blocks = len(self._policy)
            self._stats.on = not self._off
            return self._stats.copy()

    # -- one block ---------------------------------------------------------------------------------------------------

    def _load(self, digest: bytes, buffer: memoryview) -> bool:
        if self._resting():
            return False
        began = time.perf_counter()
        try:
            sound = self._files.read(self._path(digest), digest, buffer)
        except FileNotFoundError:  # another process evicted it
            self._drop(digest)
            return False
        except OSError as e:
            self._drop(digest)
            self._fail(e)
            return False
        if not sound:
            self._drop(digest)
            self._unlink(digest)
        with self._lock:
            if not sound:
                self._stats.damaged_blocks += 1
                return False
            if digest in self._policy:
                self._policy.touch(digest)
            self._stats.loaded_blocks += 1
            self._stats.loaded_bytes += self._files.file_bytes
            self._stats.load_seconds += time.perf_counter() - began
        self._well()
        return True

    def _store(self, digest: bytes, buffer: memoryview) -> bool:
        if self._resting():
            with self._lock:
                self._stats.dropped_blocks += 1
            return False
        began = time.perf_counter()
        spare, path = self._make_room(digest), self._path(digest)
        self._count += 1
        temporary = path.with_name(f"{os.getpid()}-{threading.get_ident()}-{self._count}{TEMPORARY}")
        try:
            path.parent.mkdir(exist_ok=True)  # not its parents: a disk may have been unmounted
            if spare is not None:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    os.utime(spare, follow_symlinks=False)  # it is not stale
                    spare.rename(temporary)
            self._files.write(path, temporary, digest, buffer)
        except OSError as e:
            self._fail(e)
            return False
        with self._lock:
            if digest not in self._policy:
                self._policy.insert(digest)
            self._stats.stored_blocks += 1
            self._stats.stored_bytes += self._files.file_bytes
            self._stats.store_seconds += time.perf_counter() - began
        self._well()
        return True

    def _make_room(self, incoming: bytes) -> Path | None:
        """The file of the last one that had to leave, which is the caller's to use again or to remove."""
        spare: bytes | None = None
        while True:
            with self._lock:
                if incoming in self._policy or len(self._policy) < self.capacity:
                    return self._path(spare) if spare is not None else None
                evicted = self._policy.evict(incoming, lambda key: True)
                assert evicted is not None
                self._stats.evicted_blocks += 1
            if spare is not None:
                self._unlink(spare)
            spare = evicted

    def _drop(self, digest: bytes) -> None:
        with self._lock:
            if digest in self._policy:
                self._policy.remove(digest)

    def _unlink(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._root / name[:2] / name

    # -- the directory -----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Folders that have changed since the last time; the least recently used files come first."""
        listed: dict[str, dict[bytes, float]] = {}
        for folder in os.scandir(self._root):
            changed = folder.stat().st_mtime_ns if folder.is_dir() else None
            if changed is not None and self._seen.get(folder.name) != changed:
                self._seen[folder.name] = changed
                listed[folder.name] = self._list(Path(folder.path))
        with self._lock:
            gone = [key for key in self._policy if key not in listed.get(key.hex()[:2], (key,))]
        for digest in gone:
            if not self._path(digest).exists():  # and not written since
                self._drop(digest)
        for _, digest in sorted((used, digest) for here in listed.values() for digest, used in here.items()):
            with self._lock:
                if digest in self._policy:
                    continue
            if (spare := self._make_room(digest)) is not None:
                spare.unlink(missing_ok=True)
            with self._lock:
                if digest not in self._policy:
                    self._policy.insert(digest)

    def _list(self, folder: Path) -> dict[bytes, float]:
        """Blocks and when each was used last. What cannot be one is removed; strangers' files are left alone."""
        blocks: dict[bytes, float] = {}
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(TEMPORARY):
                    if time.time() - status.st_mtime > STALE:
                        Path(entry.path).unlink()
                elif (digest := _digest(entry.name)) is not None:
                    if status.st_size == self._files.file_bytes and entry.name[:2] == folder.name:
                        blocks[digest] = status.st_mtime
                    else:
                        Path(entry.path).unlink()
        return blocks

    # -- trouble -----------------------------------------------------------------------------------------------------

    def _resting(self) -> bool:
        with self._lock:
            return self._clock.now() < self._off_until

    def _fail(self, error: OSError) -> None:
        with self._lock:
            first, self._off = not self._off, True
            self._off_until = self._clock.now() + PAUSE
            self._stats.errors += 1
        if first:
            log.warning("KV blocks on disk are off: %s; tried again every %.0f s", error, PAUSE)

    def _well(self) -> None:
        with self._lock:
            back, self._off = self._off, False
        if back:
            log.warning("KV blocks on disk are on again")


def _digest(name: str) -> bytes | None:
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == 16 and digest.hex() == name else None
