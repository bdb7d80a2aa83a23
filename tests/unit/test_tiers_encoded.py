"""Encoded blocks on disk: shorter files, the same bytes, and a miss if a file is damaged."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from sample_blocks import digest

from emberline.core.config import kernel_dir
from emberline.kernels.cpu.build import build_library
from emberline.kernels.cpu.library import load_library
from emberline.kv.codec import UnweightKVCodec
from emberline.kv.tiers.coding_gain import BlockReadTiming, CompressionGainEstimator
from emberline.kv.tiers.disk import DiskTier

SIZE = 131072
FILE = SIZE + 4096
NAMES = [digest(i) for i in range(20)]
CODEC = UnweightKVCodec(load_library(build_library(kernel_dir())), 2)


class OtherCodec(UnweightKVCodec):
    name = "other"


def block(name: bytes) -> memoryview:
    """Return bfloat16 values as large as typical keys."""
    values = np.random.default_rng(list(name)).standard_normal(SIZE // 2, np.float32)
    made = memoryview(mmap.mmap(-1, SIZE))
    made[:] = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return made


def tier(where: Path, blocks: int = 10, **more: object) -> DiskTier:
    settings: dict[str, object] = {"codec": CODEC, "codec_choice": "uw", **more}
    return DiskTier(where, "m/bf16/16", SIZE, blocks * FILE, **settings)  # type: ignore[arg-type]


def fill(disk: DiskTier, names: list[bytes]) -> None:
    assert disk.store(names, [block(n) for n in names]) == len(names)


def load(disk: DiskTier, names: list[bytes]) -> int:
    into = [memoryview(mmap.mmap(-1, SIZE)) for _ in names]
    count = disk.load(names, into)
    assert all(into[i] == block(names[i]) for i in range(count))
    return count


def file_of(where: Path, name: bytes) -> Path:
    (path,) = where.glob(f"*/*/{name.hex()}")
    return path


def test_encoded_files_are_shorter_and_reload(tmp_path: Path) -> None:
    fill(tier(tmp_path), NAMES[:3])
    assert all(file_of(tmp_path, name).stat().st_size < 0.78 * FILE for name in NAMES[:3])
    disk = tier(tmp_path)
    assert disk.lookup(NAMES) == 3 and load(disk, NAMES[:3]) == 3
    assert disk.stats().loaded_bytes < 0.78 * 3 * FILE


def test_more_encoded_blocks_fit_the_quota(tmp_path: Path) -> None:
    disk = tier(tmp_path, 7)
    for name in NAMES:
        fill(disk, [name])
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 7 * FILE
    stats = disk.stats()
    assert 8 <= stats.blocks <= stats.capacity and stats.evicted_blocks == 20 - stats.blocks
    assert load(disk, NAMES[-8:]) == 8
    disk.discard(NAMES)
    assert disk.stats().blocks == 0 and disk._used_bytes == 0 and not list(tmp_path.glob("*/*/*"))


def test_plain_and_encoded_blocks_mix(tmp_path: Path) -> None:
    fill(tier(tmp_path, codec_choice="none"), NAMES[:2])
    disk = tier(tmp_path)
    fill(disk, NAMES[2:4])
    for other in (disk, tier(tmp_path, codec_choice="none"), tier(tmp_path, codec_choice="auto")):
        assert load(other, NAMES[:4]) == 4
    full = tier(tmp_path, 3, codec_choice="none")  # files of another length are overwritten
    fill(full, NAMES[4:10])
    assert load(full, NAMES[8:10]) == 2 and full.stats().damaged_blocks == 0
    coded = tier(tmp_path, 3)
    fill(coded, NAMES[10:16])
    assert load(coded, NAMES[14:16]) == 2 and coded.stats().damaged_blocks == 0


@pytest.mark.parametrize("codec", [None, OtherCodec(CODEC._library, 2), UnweightKVCodec(CODEC._library, 4)])
def test_block_of_another_codec_is_a_miss(tmp_path: Path, codec: UnweightKVCodec | None) -> None:
    fill(tier(tmp_path), NAMES[:2])
    assert load(tier(tmp_path, codec=codec), NAMES[:2]) == 0


def test_damaged_block_is_a_miss(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    fill(disk, NAMES[:1])
    path = file_of(tmp_path, NAMES[0])
    whole = path.read_bytes()
    for at in [*range(68), 4096, 4100, 5000, 60000]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        disk.refresh()
        assert load(disk, NAMES[:1]) == 0 and not path.exists(), at
    for length in (0, 100, 4096, 8192, len(whole) - 1, len(whole) - 4096):
        path.write_bytes(whole[:length])
        assert load(disk, NAMES[:1]) == 0, length
    path.write_bytes(whole)
    assert load(disk, NAMES[:1]) == 1


def test_encoding_is_worthwhile_on_slow_disk() -> None:
    slow, fast = CompressionGainEstimator(SIZE), CompressionGainEstimator(SIZE)
    assert slow.is_encoding_faster()
    for _ in range(30):
        slow.record_read(BlockReadTiming(90_000, 1e-3, 5e-5))
        fast.record_read(BlockReadTiming(90_000, 2e-5, 5e-5))
    assert slow.is_encoding_faster() and not fast.is_encoding_faster()
    for _ in range(60):
        fast.record_read(BlockReadTiming(SIZE, 1e-3, 0.0))
    assert fast.is_encoding_faster(), "the disk became slow"
