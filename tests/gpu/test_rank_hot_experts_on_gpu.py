"""Engines whose experts move between ranks that share one GPU: tokens keep their bits, and the load evens out.

The same is tested without a GPU in tests/cpu/test_device_rank_hot_experts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import slot_cases
import tiny_deepseek
import torch
from engine_runs import run_engine
from expert_cases import BF16, F32
from hot_experts import choose_hot_experts, move_all, watch_moves
from test_rank_engine_on_gpu import MLA, SETTINGS, boot_ranks, make_plain_submissions

from emberline.core.engine_config import EngineConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.device_leader import DeviceLeaderRunner
from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.portable_backend import PortableBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda"
DP2_EP2: dict[str, Any] = {"tp": 2, "ep": 2, "dp_attention": True, "redundant_experts": 2}


@pytest.fixture(autouse=True)
def moves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_moves(monkeypatch.setattr)


def write_model(directory: Path, **changes: Any) -> Path:
    return tiny_deepseek.write_deepseek(directory, "v3", **MLA | {"dtype": torch.float32} | changes)


def run_scored(engine: Engine) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens of greedy requests and their log-probabilities, which run in the same steps each time."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    for i, length in enumerate((5, 40, 90)):
        engine.add(Submission(f"r{i}", [3 + (7 * i + 5 * j) % 900 for j in range(length)], params))
    found: dict[str, tuple[list[int], list[float]]] = {}
    while not engine.idle:
        for output in engine.step():
            tokens, scores = found.setdefault(output.id, ([], []))
            tokens += output.tokens
            scores += [each.logprob for each in output.logprobs]
    return found


@pytest.mark.parametrize("layout", [DP2_EP2, DP2_EP2 | {"tp": 4}], ids=["tp2", "tp4"])
@pytest.mark.parametrize("collectives", ["ipc", "gloo"])
def test_hot_experts_get_copies(layout: dict[str, Any], collectives: str, tmp_path: Path) -> None:
    """All rows select two experts of one rank. Captured steps stay valid while experts move."""
    write_model(tmp_path)
    choose_hot_experts(tmp_path)
    pending = make_plain_submissions()
    expected = run_engine(boot(EngineConfig.build(str(tmp_path), **SETTINGS)).engine, pending)
    engine = boot_ranks(tmp_path, **layout, collectives=collectives).engine
    runner = engine.runner
    assert isinstance(runner, DeviceLeaderRunner)
    try:
        assert run_engine(engine, pending) == expected
        before = engine.stats().experts
        assert before is not None and before.imbalance > 1.8
        captured = dict(runner._graphs.captured)
        move_all(engine, runner)
        assert run_engine(engine, pending) == expected
        after = engine.stats().experts
        assert after is not None and after.imbalance < 1.2 and after.moved > 0
        if collectives == "ipc":
            assert captured and not runner._graphs.capture_failed
            assert all(runner._graphs.captured[shape] is step for shape, step in captured.items())
    finally:
        engine.close()


@pytest.mark.parametrize("weights", ["plain", "fp8", "int4"])
def test_moves_keep_bits(weights: str, tmp_path: Path) -> None:
    """In all formats of experts, also those with scales."""
    write_model(tmp_path, dtype=torch.bfloat16, moe_intermediate_size=128)
    settings = {"dtype": "bfloat16", "weights": weights, "prefix_cache": False}
    engine = boot_ranks(tmp_path, **DP2_EP2, **settings).engine
    runner = engine.runner
    assert isinstance(runner, DeviceLeaderRunner)
    try:
        run_scored(engine)  # captures steps
        before = run_scored(engine)
        count = runner.model.config.experts
        assert count is not None
        for rows in ([90, 80, *[1] * (count.count - 2)], [*[1] * (count.count - 2), 70, 90]):
            move_all(engine, runner, rows)
            assert run_scored(engine) == before
        stats = engine.stats().experts
        assert stats is not None and stats.moved > 0
    finally:
        engine.close()


@pytest.mark.parametrize("rows", [1, 3, 40, 600])
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek-v3", "llama4"])
def test_slots(name: str, rows: int) -> None:
    torch.manual_seed(0)
    slot_cases.check_selected_slots(GPU, name, rows, 16, pdl=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_exact_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slot_cases.check_exact_sums(GPU, dtype, pdl=True)


@pytest.mark.parametrize(("rows", "dtype"), [(1, F32), (5, BF16), (300, BF16), (2000, BF16)])
def test_own_sums(rows: int, dtype: torch.dtype) -> None:
    slot_cases.check_own_sums(GPU, dtype, rows, (256, 128), ExpertLayer(PortableBackend()))
