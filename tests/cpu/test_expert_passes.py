"""Mixtures of many rows are computed in passes, and logits of ranks are exchanged in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_peak import measure_peak
from torch import Tensor

pytest.importorskip("triton")

from emberline.engine.gpu.shape import MAX_CAPTURED_TOKENS, MAX_CHUNK_TOKENS, ShapeGrid, captured_shapes
from emberline.engine.step_peak import COPIES_OF_GATHERED_ROWS
from emberline.kernels import ops, work_limits
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.kernels.cuda.expert_layer import ExpertLayer
from emberline.kernels.mixture import Mixture, Routing, StackedExperts
from emberline.kernels.packed_weight import PackedWeight
from emberline.kernels.work_limits import PASS_ROW_GRAIN, max_pass_rows, split_evenly
from emberline.models import vocabulary
from emberline.models.vocabulary import VocabularyShard

COUNT, CHOSEN = 8, 2


def make_mixture() -> Mixture:
    weight = torch.zeros(COUNT, 4)
    router = PackedWeight(weight, COUNT, 4, torch.float32)
    stacked = StackedExperts(torch.zeros(COUNT, 2, 4), torch.zeros(COUNT, 4, 1))
    return Mixture(torch.ones(4), 1e-5, router, stacked, Routing(CHOSEN))


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let passes have few rows; return how many."""
    monkeypatch.setattr(work_limits, "MIN_EXPERT_PAIRS", 2 * PASS_ROW_GRAIN * CHOSEN)
    monkeypatch.setattr(work_limits, "PAIRS_PER_EXPERT", 1)
    return max_pass_rows(COUNT, CHOSEN)


def run_and_count(layer: ExpertLayer, x: Tensor, out: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run a mixture whose passes add the double of their rows; return the numbers of rows."""
    counts: list[int] = []

    def run_pass(self: ExpertLayer, x: Tensor, mixture: Mixture, out: Tensor) -> None:
        counts.append(len(x))
        out.add_(2 * x)

    monkeypatch.setattr(ExpertLayer, "_run_pass", run_pass)
    assert layer.run(x, make_mixture(), out) is out
    return counts


def test_each_row_is_computed_once(small_passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = ExpertLayer(ops.ReferenceBackend("asked for"))
    for rows in (1, small_passes, small_passes + 1, 3 * small_passes - 5):
        x, out = torch.randn(rows, 4), torch.ones(rows, 4)
        expected = x + 2 * x
        counts = run_and_count(layer, x, out, monkeypatch)
        assert torch.equal(out, 1 + 2 * x) and sum(counts) == rows and max(counts) <= small_passes
        assert len(counts) == -(-rows // small_passes)
        assert run_and_count(layer, x, x, monkeypatch) == counts and torch.equal(x, expected)


def test_given_experts_are_computed_in_passes(small_passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for rows that other ranks have sent."""
    counts: list[int] = []

    def add_experts(self: ExpertLayer, x: Tensor, normed: Tensor, logits: Tensor, mixture: Mixture) -> Tensor:
        counts.append(len(x))
        return x.add_(normed * logits.argmax(1)[:, None])

    monkeypatch.setattr(ExpertLayer, "_add_experts", add_experts)
    x, limit = torch.randn(1100, 4), max_pass_rows(COUNT, 1)
    numbers = torch.arange(1100) % COUNT
    found = ExpertLayer(ops.ReferenceBackend("asked for")).run_assigned_experts(x, numbers.int(), make_mixture())
    assert torch.equal(found, x * numbers[:, None]) and len(counts) == -(-1100 // limit) > 1 and max(counts) <= limit


@pytest.mark.parametrize(("count", "limit", "grain"), [(1, 4, 1), (4, 4, 4), (9, 4, 4), (13, 4, 1), (1000, 256, 128)])
def test_parts_are_even(count: int, limit: int, grain: int) -> None:
    parts = list(split_evenly(count, limit, grain))
    sizes = [part.stop - part.start for part in parts]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert sum(sizes) == count and max(sizes) <= limit and len(sizes) == -(-count // limit)
    assert all(size == sizes[0] for size in sizes[:-1]) and (len(sizes) == 1 or sizes[0] % grain == 0)


@pytest.mark.parametrize(
    ("experts", "chosen", "hidden", "width", "weight_bytes"),
    [
        (128, 8, 2048, 768, 2.0),  # Qwen3-30B-A3B
        (512, 10, 2048, 512, 2.0),  # Qwen3-Next
        (16, 1, 5120, 4096, 2.0),  # a rank of Scout
        (256, 8, 7168, 256, 1.0),  # a rank of DeepSeek V3
        (384, 8, 7168, 256, 0.5625),  # a rank of Kimi K2.5
    ],
)
def test_reading_the_weights_again_costs_little(
    experts: int, chosen: int, hidden: int, width: int, weight_bytes: float
) -> None:
    """At most 5 % of the time of the products of a pass on an H200."""
    rows = max_pass_rows(experts, chosen)
    reading = experts * 3 * hidden * width * weight_bytes / 4.2e12
    multiplying = rows * chosen * 6 * hidden * width / 534e12
    assert reading <= 0.0501 * multiplying


@pytest.mark.parametrize("running", [64, 1024])
@pytest.mark.parametrize("experts_per_row", [1, 8, 32])
def test_captured_steps_are_one_pass(running: int, experts_per_row: int) -> None:
    small = ShapeGrid(MAX_CAPTURED_TOKENS, grain=256, coarse_grain=MAX_CHUNK_TOKENS)  # the most that are captured
    largest = max(shape.singles + shape.tokens for shape in captured_shapes(running, 1 << 20, small))
    assert largest > MAX_CAPTURED_TOKENS and largest <= max_pass_rows(8, experts_per_row)


def test_logits_of_ranks_are_exchanged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are the same. Parts of the vocabulary that differ in size are padded."""
    vocab, hidden = 1001, 8
    part = VocabularyShard(LoneRank(1, 2), range(501, vocab), 501, vocab)
    head, x = ops.LinearLayer(ops.pack_linear(torch.randn(500, hidden))), torch.randn(64, hidden)
    whole = part.compute_logits(x, head, None)
    assert whole.shape == (64, vocab) and torch.equal(whole[:, 501:], whole[:, :500])
    assert torch.equal(part.compute_logits(x, head, torch.empty(64, vocab)), whole)
    monkeypatch.setattr(vocabulary, "MAX_GATHERED_LOGITS", 10)
    assert torch.equal(part.compute_logits(x, head, None), whole)
    peak = measure_peak(lambda: part.compute_logits(x, head, None))
    assert peak <= 4 * vocab * (64 + COPIES_OF_GATHERED_ROWS * 10) + 80  # padding
