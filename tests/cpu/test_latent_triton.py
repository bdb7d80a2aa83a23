"""The Triton kernels of latent attention without a GPU: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from latent_cases import FP8, LITE, TINY, LatentCase, Sizes
from test_triton import CPU, compiled, compiled_kernels, interpreted, rounding  # noqa: F401

from emberline.kernels import work_limits
from emberline.kernels.cuda.latent import latent_attention
from emberline.kernels.latent_planner import split_context
from emberline.kernels.triton import latent_projection

BF16, F32 = torch.bfloat16, torch.float32
DECODE, CHUNKS = [(0, 1), (70, 1), (130, 1)], [(0, 3), (17, 2)]


@interpreted
@pytest.mark.parametrize(
    ("sizes", "dtype", "cache", "decode", "chunks", "queries", "block"),
    [
        (TINY, F32, F32, DECODE, [], 1, 16),
        (TINY, F32, F32, [(40, 2), (7, 1)], [], 2, 16),
        (TINY, F32, F32, [(20, 1)], CHUNKS, 1, 16),
        (TINY, F32, FP8, [], [(17, 2)], 1, 16),
        (Sizes(3, 16, 8, 16, 16), BF16, BF16, [(70, 1)], [(17, 2)], 1, 64),
    ],
)
def test_latents_in_the_interpreter(
    rounding: None,  # noqa: F811
    sizes: Sizes,
    dtype: torch.dtype,
    cache: torch.dtype,
    decode: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    queries: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(latent_projection, "MERGED_PARTS", 2)  # fewer than some rows have
    case = LatentCase.make(sizes, decode, chunks, dtype, cache, CPU, block=block, interleaved=cache is not FP8)
    case.check(max_queries=queries, is_captured=bool(decode))


@interpreted
def test_passes_over_cached_tokens_in_the_interpreter(rounding: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    torch.manual_seed(0)
    monkeypatch.setattr(work_limits, "MAX_EXPANDED_HEADS", 2 * 16 * 6)  # two blocks in each pass
    case = LatentCase.make(TINY, [(20, 1)], [(37, 2), (0, 1), (16, 2)], F32, F32, CPU, block=16)
    assert len(case.make_plan(has_passes=True).latent.context_passes) == 2
    case.check(has_passes=True)


@compiled
def test_latent_kernels_compile(compiled_kernels: list[Any]) -> None:  # noqa: F811
    case = LatentCase.make(LITE, [(63, 1)], [(64, 2)], BF16, BF16, CPU)
    for has_passes in (False, True):
        plan = case.make_plan(has_passes=has_passes)
        latent_attention(case.inputs, plan, None, lambda x, layer: x.new_empty(len(x), layer.weight.n))
    assert len(compiled_kernels) == 14
    assert sum("mma" in kernel.asm["ptx"] for kernel in compiled_kernels) == 11, "all but merges and copies"


def test_passes_cover_all_cached_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for blocks in (1, 3, 100):
        monkeypatch.setattr(work_limits, "MAX_EXPANDED_HEADS", blocks * 64 * 16)
        context, counts = random.integers(0, 400, 9), random.integers(0, 3, 9)
        covered: list[list[int]] = [[] for _ in context]
        for sources, ranges in split_context(context, counts, 2, 64, 16):
            assert len(sources) <= blocks
            for row, (first, number, has_state) in enumerate(ranges.tolist()):
                assert bool(has_state) == bool(covered[row]) or not number
                at = np.arange(first, first + number)
                assert (sources[at // 64, 0] == row).all()
                covered[row] += (sources[at // 64, 1] * 64 + at % 64).tolist()
        used = (np.arange(9) >= 2) & (counts > 0)
        assert covered == [list(range(n if is_used else 0)) for n, is_used in zip(context, used, strict=True)]
