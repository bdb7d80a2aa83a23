"""KV tiers of engines whose ranks have GPUs. Here the ranks are threads, and the CPU is their device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_delta
from device_rank_engines import DeviceThreadRanks, make_device_thread_engine
from rank_models import DELTA, DELTA_SIZES
from test_rank_tiers import SETTINGS, Replies, assert_same, check_changed_homes, run
from test_rank_tiers import build_config as build_cpu_config

from emberline.core.engine_config import EngineConfig
from emberline.core.plan import BlockCopy, StepPlan
from emberline.engine.boot import boot
from emberline.engine.gpu.copier import DeviceCopier
from emberline.engine.ranks.block_buffer_layout import BlockBufferLayout
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.engine.ranks.layout import Layout

TP2, PP2, BOTH, TP4 = {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}  # the models have 2 KV heads
STAGES = {"pp": 2, "pp_layers": "7,1"}  # every fourth layer attends; the leader has only the last layer, and no states
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gemma", BOTH), ("deepseek_v3", TP2), ("delta-dense", TP4), ("delta-stages", STAGES),
]  # fmt: skip


def build_config(directory: Path, name: str) -> EngineConfig:
    if name == "delta-stages":
        config = tiny_delta.make_config("dense") | DELTA | DELTA_SIZES | {"num_hidden_layers": 8}
        tiny_delta.write_random(directory, config)
        return EngineConfig.build(str(directory), **SETTINGS)
    return build_cpu_config(directory, name)


def run_on_one_rank(config: EngineConfig, length: int = 45) -> Replies:
    return run(boot(config).engine, length)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_blocks_come_back_from_host_memory(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Blocks of heads, of replicated heads, of layer groups, latents and recurrent states."""
    # A snapshot of states is stored only for prefixes of at least 64 tokens. A cache has room for one or two requests.
    length, max_blocks = (77, 15) if name.startswith("delta") else (45, 23 if name == "gemma" else 9)
    config = build_config(tmp_path, name)
    expected = run_on_one_rank(config, length)
    settings = config.with_settings(kv_host_memory=4 << 20, graphs=False, **layout)
    engine = make_device_thread_engine(settings, max_blocks=max_blocks)
    for _ in range(2):
        assert_same(run(engine, length), expected)
    host = engine.stats().tiers["host"]
    engine.close()
    assert host.hit_tokens >= length // 8 * 8


@pytest.mark.parametrize("name", ["llama", "gemma", "deepseek_v3", "delta-moe"])
def test_blocks_of_one_rank_come_back_to_another(name: str, tmp_path: Path) -> None:
    """With data-parallel attention, requests have other DP ranks after the caches were emptied."""
    length = 77 if name.startswith("delta") else 45
    config = build_config(tmp_path, name)
    expected = run_on_one_rank(config, length)
    config = config.with_settings(kv_host_memory=4 << 20, tp=2, dp_attention=True)
    with closing(make_device_thread_engine(config)) as engine:  # also if it fails: its ranks are threads
        check_changed_homes(engine, expected, length)


def test_only_the_home_of_a_block_copies_it(tmp_path: Path) -> None:
    """Blocks of several ranks have the same number. A rank that is not the first one saves too."""
    config = build_config(tmp_path, "llama").with_settings(kv_host_memory=1 << 20, tp=2, dp_attention=True)
    ranks = DeviceThreadRanks(config)
    with closing(ranks.make_engine(config)) as engine:
        tiers, caches = engine.kv.tiers, [part.runner.cache for part in ranks.parts]
        assert tiers is not None
        buffers = [tiers.host.reserve_buffer(name) for name in (b"first", b"second")]
        for number, cache in enumerate(caches):
            cache.keys[:, 3], cache.values[:, 3] = number + 1, number + 5
            cache.keys[:, 7] = cache.values[:, 7] = 0
        saves = [
            BlockCopy(3, b"", buffer, dp_rank=dp_rank) for dp_rank, buffer in enumerate(buffers) if buffer is not None
        ]
        engine.runner.launch(StepPlan(1, [], [], [], saves=saves))()
        size = caches[0].shape.block_bytes
        saved = [np.frombuffer(copy.buffer[:size], np.float32).reshape(2, -1)[:, 0].tolist() for copy in saves]
        assert saved == [[1, 5], [2, 6]] and caches[0].shape == caches[1].shape
        loads = [BlockCopy(7, b"", saves[0].buffer, dp_rank=1)]
        engine.runner.launch(StepPlan(2, [], [], [], loads=loads))()
        assert (caches[1].keys[:, 7] == 1).all() and (caches[1].values[:, 7] == 5).all()
        assert not caches[0].keys[:, 7].any() and not caches[0].values[:, 7].any()


def run_with_disk(config: EngineConfig, disk: Path, **layout: Any) -> tuple[Replies, int]:
    """Return the replies of a new engine, and how many blocks it loaded from the disk."""
    settings = config.with_settings(kv_disk=str(disk), kv_disk_size=1 << 24, graphs=False, **layout)
    engine = make_device_thread_engine(settings)
    replies = run(engine)
    engine.close()
    return replies, engine.stats().tiers["disk"].loaded_blocks


def test_disk_keeps_blocks_of_each_division(tmp_path: Path) -> None:
    """An engine finds its blocks after a restart, and not those of an engine whose ranks divide blocks differently."""
    config = build_config(tmp_path / "model", "gemma")  # 6 layers
    expected = run_on_one_rank(config)
    for layout in ({"pp": 2}, {"pp": 2, "pp_layers": "4,2"}):
        for is_loaded in (False, True):
            replies, loaded = run_with_disk(config, tmp_path / "disk", **layout)
            assert_same(replies, expected)
            assert bool(loaded) == is_loaded, layout


@pytest.mark.parametrize("layout", [TP2, PP2])
def test_copies_end_when_all_ranks_have_copied(
    layout: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank copies late, in a plan without work: no sum of the ranks lets the leader wait for it."""
    config = build_config(tmp_path, "llama").with_settings(kv_host_memory=1 << 20, graphs=False, **layout)
    ranks = DeviceThreadRanks(config)
    engine, launch = ranks.make_engine(config), DeviceCopier.launch

    def launch_late(self: DeviceCopier, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> Callable[[], None]:
        if self is not engine.runner.copier:
            time.sleep(0.05)
        return launch(self, saves, loads)

    monkeypatch.setattr(DeviceCopier, "launch", launch_late)
    assert engine.kv.tiers is not None and isinstance(engine.runner, DeviceLeaderRunner)
    buffer = engine.kv.tiers.host.reserve_buffer(b"block")
    assert buffer is not None
    caches = [part.runner.cache for part in ranks.parts]
    for number, cache in enumerate(caches):
        cache.keys[:, 3], cache.values[:, 3] = number + 1, number + 5
    engine.runner.launch(StepPlan(1, [], [], [], saves=[BlockCopy(3, b"block", buffer)]))()
    size = sum(cache.shape.block_bytes for cache in caches)
    saved = np.frombuffer(buffer[:size], np.float32).reshape(4, -1)[
        :, 0
    ]  # keys and values of one rank, then of the other
    assert saved.tolist() == [1, 5, 2, 6]
    engine.runner.launch(StepPlan(2, [], [], [], loads=[BlockCopy(7, b"block", buffer)]))()
    for number, cache in enumerate(caches):
        assert (cache.keys[:, 7] == number + 1).all() and (cache.values[:, 7] == number + 5).all()
    engine.close()


def test_places_of_parts() -> None:
    """Ranks with the same heads share a place, unless they have different recurrent states."""
    sizes, none = dict.fromkeys(range(4), 64), dict.fromkeys(range(4), 0)
    parts = BlockBufferLayout.plan(Layout(4), 2, sizes, none)
    assert (parts.offsets, parts.block_bytes, parts.pages_per_slot) == ({0: 0, 1: 0, 2: 64, 3: 64}, 128, 0)
    assert [parts.saves_blocks(rank) for rank in range(4)] == [True, False, True, False]
    parts = BlockBufferLayout.plan(Layout(2, 2), 1, sizes, none)
    assert parts.offsets == {0: 0, 1: 0, 2: 64, 3: 64}
    parts = BlockBufferLayout.plan(Layout(4), 2, sizes, none | {2: 130})
    assert (list(parts.offsets.values()), parts.block_bytes, parts.pages_per_slot) == ([0, 64, 128, 192], 256, 3)
    parts = BlockBufferLayout.plan(Layout(4, dp_attention=True), 2, sizes, dict.fromkeys(range(4), 130))
    assert (list(parts.offsets.values()), parts.block_bytes, parts.pages_per_slot) == ([0, 0, 0, 0], 64, 3)
    assert all(parts.saves_blocks(rank) for rank in range(4))
