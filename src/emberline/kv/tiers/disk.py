"""DiskTier: blocks in files, one each, below DIR/LAYOUT/XX/HASH. A restart finds them again by their names.

One file per block, not packed segments: these are faster (`bench/tiers.py` measures both), but they need compaction,
an index that survives a crash, and a lock between processes; names and renames need none of these, and a block comes
back many times faster than it is computed either way.

Several processes may share a directory. Guaranteed: nobody ever reads a block that is torn or another's (a file is
complete or absent, and names, lengths and checksums are verified); a file that one process evicts is a miss for the
others. Not guaranteed: that a block is seen at once by others (it takes until they `refresh`), and the quota, which
each process holds for what it has seen: together they may exceed it by what they write between two looks.

With a codec, blocks are stored coded where that brings them back sooner (`gain.py`), always, or never; whatever lies
there is read. The quota counts bytes, so more of them fit.

A full disk makes blocks leave before the quota does; where that is not enough, stores are skipped for a while and
loads go on. A directory that was deleted is made again, unless its file system is gone (unmounted). Any other I/O error
turns the tier off for a while. Each of these is one line in the log; requests notice nothing.
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
from emberline.kv.checksum import Crc, crc_of
from emberline.kv.codec import Codec
from emberline.kv.tiers.base import buffer_size
from emberline.kv.tiers.blockfile import BlockFiles
from emberline.kv.tiers.blockform import BlockForm, layout_hash
from emberline.kv.tiers.gain import Gain
from emberline.kv.tiers.policy import policy_of

log = logging.getLogger("emberline.kv")

PAUSE = 30.0  # seconds without the disk after an error; then it is tried again
STALE = 600.0  # seconds after which a file that nobody finished is nobody's
TEMPORARY = ".part"
FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_EVICTIONS_PER_WRITE = 8  # on a full disk; what they free may be taken by other programs


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
        codec: Codec | None = None,
        coding: str = "auto",
        clock: Clock | None = None,
    ) -> None:
        """`coding`: of what is stored from now on: auto, uw or none."""
        digest = layout_hash(layout)
        form = BlockForm(digest, buffer_size(block_bytes), crc or crc_of(None), codec)
        self._files = BlockFiles(form)
        self._coding, self._gain = coding, Gain(form.buffer_bytes)
        self._quota = quota
        self.capacity = quota // form.most_bytes  # of blocks as they are
        if self.capacity < 1:
            raise InvalidRequest(f"{quota} bytes hold no block of {form.most_bytes}", param="kv_disk_size")
        self._root = directory / digest.hex()
        self._clock = clock or SystemClock()
        self._policy = policy_of(policy, self.capacity)
        self._lock = threading.Lock()  # of everything below; not held while files are read or written
        self._sizes: dict[bytes, int] = {}  # of the files of those in the policy
        self._used = 0  # the sum of these
        self._seen: dict[str, int] = {}  # folders, and when each had last changed
        self._off_until = float("-inf")
        self._off = False
        self._full = False  # at the last write
        self._stores_off_until = float("-inf")  # on a full disk
        self._count = 0
        self._stats = TierStats(capacity=self.capacity)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._device = self._root.stat().st_dev
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

    def guess(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes)

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
            self._stats.capacity = self._quota * len(self._policy) // self._used if self._used else self.capacity
            self._stats.on = not self._off
            return self._stats.copy()

    def close(self) -> None:
        """There is nothing to give back."""

    # -- one block ---------------------------------------------------------------------------------------------------

    def _load(self, digest: bytes, buffer: memoryview) -> bool:
        if self._resting():
            return False
        began = time.perf_counter()
        try:
            found = self._files.read(self._path(digest), digest, buffer)
        except FileNotFoundError:  # another process evicted it
            self._drop(digest)
            return False
        except OSError as e:
            self._drop(digest)
            self._fail(e)
            return False
        if found is None:
            self._drop(digest)
            self._unlink(digest)
        with self._lock:
            if found is None:
                self._stats.damaged_blocks += 1
                return False
            if digest in self._policy:
                self._policy.touch(digest)
            self._gain.note(found)
            self._stats.loaded_blocks += 1
            self._stats.loaded_bytes += found.size
            self._stats.load_seconds += time.perf_counter() - began
        self._well()
        return True

    def _store(self, digest: bytes, buffer: memoryview) -> bool:
        began = time.perf_counter()
        resting = self._resting() or self._clock.now() < self._stores_off_until
        size = None if resting else self._write(digest, buffer)
        if size is None:
            with self._lock:
                self._stats.dropped_blocks += 1
            return False
        with self._lock:
            self._insert(digest, size)
            self._stats.stored_blocks += 1
            self._stats.stored_bytes += size
            self._stats.store_seconds += time.perf_counter() - began
        self._well()
        return True

    def _write(self, digest: bytes, buffer: memoryview) -> int | None:
        """Return the bytes written; None: an error, or the disk is full and stays so whatever leaves."""
        for evicted in range(1 + MAX_EVICTIONS_PER_WRITE):
            try:
                size = self._write_once(digest, buffer)
            except OSError as e:
                if e.errno not in FULL:
                    self._fail(e)
                    return None
                self._note_full(e)
                if evicted == MAX_EVICTIONS_PER_WRITE or not self._evict_one(digest):
                    break
            else:
                self._full = evicted > 0
                return size
        self._stores_off_until = self._clock.now() + PAUSE
        return None

    def _write_once(self, digest: bytes, buffer: memoryview) -> int:
        path = self._path(digest)
        self._make_folder(path.parent)  # before room is made: a deleted directory leaves nothing to evict
        spare = self._make_room(digest, self._files.form.most_bytes)
        self._count += 1
        temporary = path.with_name(f"{os.getpid()}-{threading.get_ident()}-{self._count}{TEMPORARY}")
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.utime(spare, follow_symlinks=False)  # it is not stale
                spare.rename(temporary)
        coded = self._coding == "uw" or (self._coding == "auto" and self._gain.pays())
        return self._files.write(path, temporary, digest, buffer, coded=coded)

    def _evict_one(self, incoming: bytes) -> bool:
        """Remove the block that the policy would drop for `incoming`; False: there is none."""
        with self._lock:
            evicted = self._policy.evict(incoming, lambda key: True) if len(self._policy) else None
            if evicted is None:
                return False
            self._used -= self._sizes.pop(evicted)
            self._stats.evicted_blocks += 1
        self._unlink(evicted)
        return True

    def _make_room(self, incoming: bytes, size: int) -> Path | None:
        """The file of the last one that had to leave, which is the caller's to use again or to remove."""
        spare: bytes | None = None
        while True:
            with self._lock:
                if incoming in self._policy or self._used + size <= self._quota:
                    return self._path(spare) if spare is not None else None
                evicted = self._policy.evict(incoming, lambda key: True)
                assert evicted is not None
                self._used -= self._sizes.pop(evicted)
                self._stats.evicted_blocks += 1
            if spare is not None:
                self._unlink(spare)
            spare = evicted

    def _drop(self, digest: bytes) -> None:
        with self._lock:
            if digest in self._policy:
                self._policy.remove(digest)
                self._used -= self._sizes.pop(digest)

    def _insert(self, digest: bytes, size: int) -> None:
        """Under the lock. It may be there already, and may have had another length."""
        if digest not in self._policy:
            self._policy.insert(digest)
        self._used += size - self._sizes.get(digest, 0)
        self._sizes[digest] = size

    def _unlink(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._root / name[:2] / name

    # -- the directory -----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Folders that have changed since the last time; the least recently used files come first."""
        listed: dict[str, dict[bytes, tuple[float, int]]] = {}
        seen: dict[str, int] = {}  # not before all of it is taken in: one folder may fail to be read
        here = self._folders()
        for folder in here:
            changed = folder.stat().st_mtime_ns if folder.is_dir() else None
            if changed is not None and self._seen.get(folder.name) != changed:
                seen[folder.name] = changed
                listed[folder.name] = self._list(Path(folder.path))
        empty: dict[bytes, tuple[float, int]] = {}
        names = {folder.name for folder in here}
        listed |= {name: empty for name in self._seen if name not in names}  # folders that were deleted
        self._seen = {name: changed for name, changed in self._seen.items() if name in names}
        with self._lock:
            gone = [key for key in self._policy if key not in listed.get(key.hex()[:2], (key,))]
        for digest in gone:
            if not self._path(digest).exists():  # and not written since
                self._drop(digest)
        for (_, size), digest in sorted((found, digest) for here in listed.values() for digest, found in here.items()):
            with self._lock:
                if digest in self._policy:
                    continue
            if (spare := self._make_room(digest, size)) is not None:
                spare.unlink(missing_ok=True)
            with self._lock:
                self._insert(digest, size)
        self._seen |= seen

    def _folders(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root) as found:
                return list(found)
        except FileNotFoundError:
            self._recreate()
            return []

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            self._recreate()
            folder.mkdir(exist_ok=True)

    def _recreate(self) -> None:
        """Make a deleted directory again. Raises OSError if its file system is gone: what lies under the mount point
        must not fill up instead."""
        nearest = next(folder for folder in self._root.parents if folder.exists())
        if nearest.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, "its file system is not mounted", str(self._root))
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            gone = list(self._policy)
        for digest in gone:
            self._drop(digest)
        self._seen = {}
        log.warning("KV disk directory was deleted, created again: path=%s blocks_lost=%d", self._root, len(gone))

    def _list(self, folder: Path) -> dict[bytes, tuple[float, int]]:
        """Blocks, when each was used last, and its bytes. What cannot be one is removed; strangers' files are left."""
        blocks: dict[bytes, tuple[float, int]] = {}
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(TEMPORARY):
                    if time.time() - status.st_mtime > STALE:
                        Path(entry.path).unlink()
                elif (digest := _digest(entry.name)) is not None:
                    if self._files.is_length(status.st_size) and entry.name[:2] == folder.name:
                        blocks[digest] = status.st_mtime, status.st_size
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

    def _note_full(self, error: OSError) -> None:
        with self._lock:
            first, self._full = not self._full, True
            self._stats.errors += first
        if first:
            log.warning("KV disk is full, blocks leave before the quota does: path=%s error=%s", self._root, error)

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
