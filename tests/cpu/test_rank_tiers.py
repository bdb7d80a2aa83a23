"""KV tiers of engines on several ranks. Here the ranks are threads; see also test_ranks.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny_families
from rank_engines import ThreadRanks, make_thread_engine
from rank_models import FULL, HEADS, SLIDING, WRITERS
from tiny import write_tensors

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import BlockCopy
from emberline.core.request import Request, Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.leader import LeaderRunner
from emberline.kv.rank_managers import RankKVManagers
from emberline.kv.tiers.block_shard_copier import BlockShardCopier

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "dtype": "float32", "block_size": 8, "max_batch_tokens": 32,
    "max_running": 2, "kv_memory": 1 << 20,
}  # fmt: skip
TP2, PP2, BOTH, TP4 = {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}  # the models have 2 KV heads
GEMMA = tiny_families.gemma3(**HEADS | {"num_hidden_layers": 6}, layer_types=[SLIDING, SLIDING, FULL] * 2)
Replies = dict[str, tuple[list[int], list[float]]]  # tokens and log-probabilities by request


def submissions(length: int = 45) -> list[Submission]:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    prompts = [[3 + (7 * i + 5 * j + i * j) % 90 for j in range(length)] for i in range(3)]
    return [Submission(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def build_config(directory: Path, name: str, **settings: Any) -> EngineConfig:
    if name == "gemma":
        write_tensors(directory, GEMMA, tiny_families.tensors(GEMMA))
    else:
        WRITERS[name](directory)
    return EngineConfig.build(str(directory), **SETTINGS | settings)


def run(engine: Engine, length: int = 45, order: Sequence[Submission] = ()) -> Replies:
    for submission in order or submissions(length):
        engine.add(submission)
    replies: Replies = {}
    while not engine.idle:
        for output in engine.step():
            tokens, logprobs = replies.setdefault(output.id, ([], []))
            tokens += output.tokens
            logprobs += [each.logprob for each in output.logprobs]
    engine.kv.check_invariants()
    if (tiers := engine.kv.tiers) is not None:
        assert tiers.wait_until_written(10.0)
        tiers.host.check_invariants()
        assert tiers.host.num_pinned == 0
    return replies


def assert_same(found: Replies, expected: Replies) -> None:
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    for name, (_, logprobs) in found.items():
        assert logprobs == pytest.approx(expected[name][1], abs=1e-4)


CASES = [
    ("llama", TP2), ("llama", PP2), ("llama", BOTH), ("llama", TP4), ("gemma", PP2), ("gemma", BOTH),
    ("deepseek_v3", TP2), ("deepseek_v3", PP2), ("delta-dense", TP4), ("delta-moe", BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_blocks_come_back_from_host_memory(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    """Blocks of heads, of replicated heads, of layer groups, latents and recurrent states."""
    # A snapshot of states is stored only for prefixes of at least 64 tokens. A cache has room for one or two requests.
    length, max_blocks = (77, 15) if name.startswith("delta") else (45, 9)
    config = build_config(tmp_path, name)
    expected = run(boot(config).engine, length)
    engine = make_thread_engine(config.with_settings(kv_host_memory=4 << 20, **layout), max_blocks=(max_blocks, 7))
    assert engine.groups.windows == ((0, 7, 7) if name == "gemma" else (0,))
    for _ in range(3):
        assert_same(run(engine, length), expected)
    host = engine.stats().tiers["host"]
    engine.close()
    assert host.hit_tokens >= 3 * (length // 8 * 8)


@pytest.mark.parametrize("name", ["llama", "gemma", "deepseek_v3", "delta-moe"])
def test_blocks_of_one_rank_come_back_to_another(name: str, tmp_path: Path) -> None:
    """With data-parallel attention, requests have other homes after the caches were emptied."""
    length = 77 if name.startswith("delta") else 45
    config = build_config(tmp_path, name)
    expected = run(boot(config).engine, length)
    config = config.with_settings(kv_host_memory=4 << 20, tp=2, dp_attention=True)
    with closing(make_thread_engine(config)) as engine:  # also if it fails: its ranks are threads
        check_changed_homes(engine, expected, length)


def check_changed_homes(engine: Engine, expected: Replies, length: int) -> None:
    """Run requests, empty the caches of all ranks, and run them again on other ranks, with blocks of the host tier."""
    homes: list[dict[str, int]] = []
    first, second, third = submissions(length)
    for order in ([first, second, third], [second, third, first]):
        assert isinstance(engine.kv, RankKVManagers)
        admit, found = engine.kv.admit, dict[str, int]()

        def note_home(request: Request, reserved_blocks: int, admit: Any = admit, found: Any = found) -> bool:
            is_admitted = bool(admit(request, reserved_blocks))
            if is_admitted:
                found[request.id] = engine.kv.dp_rank_of(request)  # type: ignore[union-attr]
            return is_admitted

        engine.kv.admit = note_home  # type: ignore[method-assign]
        assert_same(run(engine, length, order), expected)
        homes.append(found)
        engine.reset_kv()
    assert homes[0].keys() == homes[1].keys() and homes[0] != homes[1]
    assert engine.stats().tiers["host"].hit_tokens >= 3 * 40


def run_with_disk(config: EngineConfig, disk: Path, **layout: int) -> tuple[Replies, int]:
    """Return the replies of a new engine, and how many blocks it loaded from the disk."""
    settings = {"kv_disk": str(disk), "kv_disk_size": 1 << 24, **layout}
    whole = config.with_settings(**settings)
    engine = make_thread_engine(whole) if layout else boot(whole).engine
    replies = run(engine)
    engine.close()
    return replies, engine.stats().tiers["disk"].loaded_blocks


def test_disk_keeps_whole_blocks(tmp_path: Path) -> None:
    """Stages and one rank compute the same bits and share blocks. Tensor ranks find only their own after a restart."""
    config = build_config(tmp_path / "model", "llama")
    expected, loaded = run_with_disk(config, tmp_path / "disk")
    assert loaded == 0
    assert run_with_disk(config, tmp_path / "disk", pp=2) == (expected, 15)
    first, loaded = run_with_disk(config, tmp_path / "disk", tp=2)
    assert loaded == 0
    assert_same(first, expected)
    assert run_with_disk(config, tmp_path / "disk", tp=2, pp=2) == (first, 15)
    assert run_with_disk(config, tmp_path / "staged", pp=2) == (expected, 0)
    assert run_with_disk(config, tmp_path / "staged") == (expected, 15)


@pytest.mark.parametrize("layout", [TP2, PP2])
def test_buffers_are_used_again_after_all_ranks_have_copied(
    layout: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank copies late. Saved blocks must not be written to disk, and loaded ones not be evicted, before it has.

    Host memory has few buffers, so that they are used again at once. Some saves are in steps without work."""
    config = build_config(tmp_path / "model", "llama")

    def copy_late(copy: Callable[[BlockShardCopier, Sequence[BlockCopy]], None]) -> Any:
        def run_late(self: BlockShardCopier, copies: Sequence[BlockCopy]) -> None:
            if copies and self is slow:
                time.sleep(0.005)
            copy(self, copies)

        return run_late

    for name in ("save", "load"):
        monkeypatch.setattr(BlockShardCopier, name, copy_late(getattr(BlockShardCopier, name)))
    expected = run(boot(config).engine)
    settings = {"kv_disk": str(tmp_path / "disk"), "kv_disk_size": 1 << 24, "kv_host_memory": 8 * 4096}
    engine = make_thread_engine(config.with_settings(**settings, **layout), max_blocks=(9, 0))
    runner = engine.runner
    assert isinstance(runner, LeaderRunner) and isinstance(runner.ranks, ThreadRanks)
    (slow,) = [part.executor.copier for part in runner.ranks.parts if part is not runner.ranks.leader]
    for _ in range(4):
        assert_same(run(engine), expected)
    tiers = engine.stats().tiers
    engine.close()
    assert tiers["disk"].loaded_blocks > 15 and tiers["host"].evicted_blocks > 15


def test_coded_blocks(tmp_path: Path) -> None:
    """Blocks on disk are coded by the leader, whole."""
    config = build_config(tmp_path / "model", "llama", dtype="bfloat16", kv_codec="uw")
    first, loaded = run_with_disk(config, tmp_path / "disk", tp=4)
    assert loaded == 0 and run_with_disk(config, tmp_path / "disk", tp=4) == (first, 15)
