"""DiskTier: torn, foreign or damaged files are misses, and disk errors fail no request."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sample_blocks import BLOCK_BYTES, BUFFER_BYTES, block, buffer, content, digest

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest
from emberline.kv.tiers import blockfile
from emberline.kv.tiers.disk import MAX_EVICTIONS_PER_WRITE, RETRY_INTERVAL_S, STALE_FILE_S, DiskTier

FILE = BUFFER_BYTES + 4096
NAMES = [digest(i) for i in range(6)]


def tier(directory: Path, blocks: int = 10, layout: str = "m/bf16/16", **more: object) -> DiskTier:
    return DiskTier(directory, layout, BLOCK_BYTES, blocks * FILE, **more)  # type: ignore[arg-type]


def fill(disk: DiskTier, names: list[bytes]) -> None:
    assert disk.store(names, [block(n) for n in names]) == len(names)


def load(disk: DiskTier, names: list[bytes]) -> int:
    """Return how many leading blocks load, after checking their content."""
    into = [buffer() for _ in names]
    count = disk.load(names, into)
    assert [bytes(b) for b in into[:count]] == [content(n) for n in names[:count]]
    return count


def file_of(directory: Path, name: bytes) -> Path:
    (path,) = directory.glob(f"*/*/{name.hex()}")
    return path


@pytest.fixture(params=["direct", "buffered", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "buffered":
        monkeypatch.setattr(blockfile, "O_DIRECT", 0)
    if request.param == "memory":  # a file system that may have no direct I/O
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm")
        path = Path("/dev/shm") / f"emberline-test-{os.getpid()}"
        request.addfinalizer(lambda: subprocess.run(["rm", "-r", str(path)], check=True))
        return path
    return tmp_path


def test_restart_finds_stored_blocks(directory: Path) -> None:
    fill(tier(directory), NAMES[:3])
    disk = tier(directory)
    assert disk.lookup(NAMES) == 3 and load(disk, NAMES) == 3
    stats = disk.stats()
    assert (stats.blocks, stats.loaded_blocks, stats.damaged_blocks, stats.on) == (3, 3, 0, True)
    disk.discard(NAMES[:1])
    assert disk.lookup(NAMES) == 0 and tier(directory).lookup(NAMES[1:]) == 2


def test_unaligned_buffers_work(directory: Path) -> None:
    disk = tier(directory)
    odd = memoryview(bytearray(BUFFER_BYTES + 9))[9:]
    odd[:] = content(NAMES[0])
    assert disk.store(NAMES[:1], [odd]) == 1
    odd[:] = bytes(BUFFER_BYTES)
    assert disk.load(NAMES[:1], [odd]) == 1 and bytes(odd) == content(NAMES[0])


def test_layouts_do_not_share_files(directory: Path) -> None:
    fill(tier(directory), NAMES[:1])
    other = tier(directory, layout="m/bf16/32")
    assert other.lookup(NAMES[:1]) == 0 and load(other, NAMES[:1]) == 0


DAMAGES = {
    "emptied": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "only the page": lambda data: data[:4096],
    "longer": lambda data: data + b"x",
    "a bit of the block": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "a bit of the last byte": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "zeros": lambda data: bytes(len(data)),
    "the end never written": lambda data: data[:8192] + bytes(len(data) - 8192),
    "an older version": lambda data: data[:8] + b"\1" + data[9:],
    "another layout": lambda data: data[:20] + bytes(16) + data[36:],
    "the CRC itself": lambda data: data[:60] + b"\0\0\0\0" + data[64:],
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_miss_and_removed(tmp_path: Path, damage: str, restart: bool) -> None:
    disk = tier(tmp_path)
    fill(disk, NAMES[:3])
    path = file_of(tmp_path, NAMES[1])
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    disk = tier(tmp_path) if restart else disk
    assert load(disk, NAMES[:3]) == 1
    assert not path.exists() and disk.lookup(NAMES) == 1 and disk.stats().on
    fill(disk, NAMES[1:2])
    assert load(disk, NAMES[:3]) == 3


def test_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    fill(disk, NAMES[:2])
    file_of(tmp_path, NAMES[0]).write_bytes(file_of(tmp_path, NAMES[1]).read_bytes())
    assert load(disk, NAMES[:2]) == 0 and disk.stats().damaged_blocks == 1


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    fill(tier(tmp_path), NAMES[:2])
    folder = file_of(tmp_path, NAMES[0]).parent
    (folder / "notes.txt").write_text("mine")
    (folder.parent / "file").write_text("mine")
    fresh, stale = folder / "1-2-3.part", folder / "1-2-4.part"
    fresh.write_bytes(b"begun")
    stale.write_bytes(b"begun")
    os.utime(stale, (time.time() - 2 * STALE_FILE_S,) * 2)
    linked = file_of(tmp_path, NAMES[1])
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    disk = tier(tmp_path)
    assert load(disk, NAMES[:2]) == 1
    assert (folder / "notes.txt").read_text() == "mine" and fresh.exists() and not stale.exists()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_quota_is_kept(tmp_path: Path, policy: str) -> None:
    disk = tier(tmp_path, 3, policy=policy)
    fill(disk, NAMES[:3])
    assert load(disk, NAMES[:1]) == 1
    fill(disk, NAMES[3:])
    assert disk.lookup(NAMES[:1]) == (policy == "arc"), "ARC keeps blocks that were used twice"
    assert len(list(tmp_path.glob("*/*/*"))) == 3 == disk.stats().blocks and disk.stats().evicted_blocks == 3
    smaller = tier(tmp_path, 2)
    assert len(list(tmp_path.glob("*/*/*"))) == 2 == smaller.stats().blocks
    with pytest.raises(InvalidRequest, match="one KV block of this model needs"):
        tier(tmp_path, 0)


def test_restart_keeps_order_of_use(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    fill(disk, NAMES[:3])
    for age, name in enumerate(NAMES[:3]):
        os.utime(file_of(tmp_path, name), (1000 + age, 1000 + age))
    assert load(disk, NAMES[:1]) == 1
    again = tier(tmp_path, 3)
    fill(again, NAMES[3:5])
    assert [again.lookup([n]) for n in NAMES[:5]] == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_write_error_turns_tier_off_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock = ManualClock()
    disk = tier(tmp_path, clock=clock)
    fill(disk, NAMES[:2])

    def writev(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(os, "writev", writev)
        for _ in range(3):
            assert disk.store([NAMES[2]], [block(NAMES[2])]) == 0
            assert disk.lookup(NAMES) == 0 and not disk.stats().on and load(disk, NAMES[:1]) == 0
            clock.advance(RETRY_INTERVAL_S)  # the retry fails again
    assert [r.message for r in caplog.records if "off" in r.message] == [caplog.records[0].message]
    assert not list(tmp_path.glob("*/*/*.part")) and len(list(tmp_path.glob("*/*/*"))) == 2
    fill(disk, NAMES[2:3])
    assert disk.stats().on and load(disk, NAMES[:3]) == 3 and "on again" in caplog.records[-1].message


def test_partial_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier(tmp_path)
    whole = os.writev
    monkeypatch.setattr(os, "writev", lambda handle, parts: whole(handle, parts[:1]))
    assert disk.store(NAMES[:1], [block(NAMES[0])]) == 0 and disk.stats().dropped_blocks == 1
    assert list(tmp_path.glob("*/*/*")) == []


def allow_bytes(monkeypatch: pytest.MonkeyPatch, directory: Path, blocks: Callable[[], int]) -> None:
    """Simulate a disk with space for so many blocks besides files of other programs."""
    whole = os.writev

    def writev(handle: int, parts: Sequence[memoryview]) -> int:
        if len([path for path in directory.glob("*/*/*") if path.stat().st_size]) >= blocks():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(handle, parts)

    monkeypatch.setattr(os, "writev", writev)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_full_disk_evicts_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    disk = tier(tmp_path, policy=policy)
    allow_bytes(monkeypatch, tmp_path, lambda: 3)
    with caplog.at_level(logging.WARNING):
        fill(disk, NAMES)
    assert disk.stats().on and disk.stats().evicted_blocks == 3 == disk.stats().blocks
    assert load(disk, NAMES[3:]) == 3
    assert ["KV disk is full" in record.message for record in caplog.records] == [True]


def test_disk_filled_by_others_skips_stores_and_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, room = ManualClock(), [20]
    disk = tier(tmp_path, 20, clock=clock)
    names = [digest(i) for i in range(20)]
    fill(disk, names[:12])
    allow_bytes(monkeypatch, tmp_path, lambda: room[0])
    room[0] = 0
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert disk.store(names[12:13], [block(names[12])]) == 0
    assert len(caplog.records) == 1 and disk.stats().on
    assert disk.stats().blocks == 12 - MAX_EVICTIONS_PER_WRITE and disk.stats().dropped_blocks == 3
    assert load(disk, names[MAX_EVICTIONS_PER_WRITE:12]) == 12 - MAX_EVICTIONS_PER_WRITE, (
        "the remaining blocks are still loaded"
    )
    clock.advance(RETRY_INTERVAL_S)
    assert disk.store(names[12:13], [block(names[12])]) == 0 and disk.stats().blocks == 0
    clock.advance(RETRY_INTERVAL_S)
    room[0] = 20
    fill(disk, names[12:14])
    assert load(disk, names[12:14]) == 2


def test_read_error_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    disk = tier(tmp_path, clock=clock)
    fill(disk, NAMES[:2])

    def readv(*args: object) -> int:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", readv)
        assert load(disk, NAMES[:2]) == 0
    assert not disk.stats().on and disk.stats().errors == 1 and disk.lookup(NAMES) == 0
    clock.advance(RETRY_INTERVAL_S)
    assert load(disk, NAMES[1:2]) == 1 and disk.stats().on


@pytest.mark.parametrize("depth", ["kv", "layout", "folder"])
@pytest.mark.parametrize("noticed", ["store", "refresh"])
def test_deleted_directory_is_created_again(tmp_path: Path, depth: str, noticed: str) -> None:
    disk = tier(tmp_path / "above" / "kv")
    fill(disk, NAMES[:2])
    folder = file_of(tmp_path / "above" / "kv", NAMES[0]).parent
    disk.refresh()
    shutil.rmtree({"kv": tmp_path / "above", "layout": folder.parent, "folder": folder}[depth])
    if noticed == "refresh":
        disk.refresh()
        assert disk.lookup(NAMES[:1]) == 0 and disk.stats().on
    fill(disk, NAMES[2:4])
    assert load(disk, NAMES[2:4]) == 2 and load(disk, NAMES[:1]) == 0 and disk.stats().on
    fill(disk, NAMES[:1])
    assert load(disk, NAMES[:1]) == 1 and load(tier(tmp_path / "above" / "kv"), NAMES[2:4]) == 2


def test_unmounted_directory_recovers(tmp_path: Path) -> None:
    """After an unmount, the file system below the mount point must not fill up."""
    clock = ManualClock()
    disk = tier(tmp_path / "kv", clock=clock)
    fill(disk, NAMES[:2])
    disk._device += 1  # the parent is then on another device
    (tmp_path / "kv").rename(tmp_path / "away")
    assert load(disk, NAMES[:1]) == 0
    assert disk.store(NAMES[2:3], [block(NAMES[2])]) == 0 and not disk.stats().on
    assert not (tmp_path / "kv").exists()
    (tmp_path / "away").rename(tmp_path / "kv")
    clock.advance(RETRY_INTERVAL_S)
    assert load(disk, NAMES[1:2]) == 1 and disk.stats().on


def test_unusable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be used"):
        tier(tmp_path / "file")


# -- several processes -------------------------------------------------------------------------------------------------


def test_failed_listing_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    mine, theirs = tier(tmp_path, clock=clock), tier(tmp_path)
    fill(theirs, NAMES[:3])
    turns, listing = iter([1, 2]), mine._list_blocks

    def fails(folder: Path) -> dict[bytes, tuple[float, int]]:
        if next(turns, None) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return listing(folder)

    monkeypatch.setattr(mine, "_list_blocks", fails)
    mine.refresh()
    assert mine.lookup(NAMES[:3]) == 0 and mine.stats().errors == 1
    clock.advance(RETRY_INTERVAL_S + 1)
    mine.refresh()
    assert mine.lookup(NAMES[:3]) == 3


def test_refresh_finds_blocks_of_other_processes(tmp_path: Path) -> None:
    mine, theirs = tier(tmp_path), tier(tmp_path)
    fill(theirs, NAMES[:3])
    assert mine.lookup(NAMES) == 0
    mine.refresh()
    assert mine.lookup(NAMES) == 3 and load(mine, NAMES[:3]) == 3
    theirs.discard(NAMES[:1])
    assert mine.lookup(NAMES) == 3 and load(mine, NAMES[:1]) == 0, "a miss, no error"
    theirs.discard(NAMES[1:2])
    mine.refresh()
    assert mine.lookup(NAMES[1:2]) == 0 and mine.lookup(NAMES[2:3]) == 1 and mine.stats().on


@pytest.mark.parametrize("when", ["before the read", "after it"])
def test_file_reused_while_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    mine = tier(tmp_path, 1)
    fill(mine, NAMES[:1])
    theirs, read = tier(tmp_path, 1), os.readv
    number = file_of(tmp_path, NAMES[0]).stat().st_ino

    def readv(handle: int, parts: list[memoryview]) -> int:
        before = read(handle, parts) if when == "after it" else 0
        fill(theirs, NAMES[1:2])
        return before or read(handle, parts)

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", readv)
        assert load(mine, NAMES[:1]) == 0
    assert mine.stats().damaged_blocks == 0 and mine.stats().on
    assert file_of(tmp_path, NAMES[1]).stat().st_ino == number, "the test needs the same file"
    assert load(theirs, NAMES[1:2]) == 1


def writer(directory: Path) -> subprocess.Popen[bytes]:
    """Store and evict continuously, in another process."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
import test_tiers_disk as t
disk = t.tier(Path({str(directory)!r}), 4)
print("up", flush=True)
while True:
    for i in range(12):
        disk.store([t.digest(i)], [t.block(t.digest(i))])
"""
    path = [str(Path(__file__).parent), *sys.path]
    child = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"], stdout=-1)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    return child


def test_concurrent_process_stores_evicts_and_dies(tmp_path: Path) -> None:
    names = [digest(i) for i in range(12)]
    mine = tier(tmp_path, 4)
    for _ in range(3):
        found, child = 0, writer(tmp_path)
        try:
            while found < 50:
                mine.refresh()
                found += sum(load(mine, [n]) for n in names if mine.lookup([n]))
                assert child.poll() is None
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.communicate()
        heir = tier(tmp_path)
        assert sum(load(heir, [n]) for n in names) == heir.stats().blocks
    assert mine.stats().on and mine.stats().damaged_blocks == 0
