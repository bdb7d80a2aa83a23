"""The Triton kernels of latent attention without a GPU: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from latent_cases import FP8, LITE, TINY, LatentCase, Sizes
from test_triton import CPU, compiled, compiled_kernels, interpreted, rounding, run_in_interpreter  # noqa: F401

from emberline.kernels import worklist
from emberline.kernels.cuda.latent import latent_attention

BF16, F32 = torch.bfloat16, torch.float32
DECODE, CHUNKS = [(0, 1), (70, 1), (130, 1)], [(0, 5), (33, 3)]


@compiled
def test_all_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@interpreted
@pytest.mark.parametrize(
    ("sizes", "dtype", "cache", "decode", "chunks", "queries", "block"),
    [
        (TINY, F32, F32, DECODE, [], 1, 16),
        (TINY, F32, F32, [(40, 2), (7, 1)], [], 2, 16),
        (TINY, F32, F32, [(20, 1)], CHUNKS, 1, 16),
        (TINY, F32, FP8, [(20, 1)], CHUNKS, 1, 64),
        (Sizes(16, 16, 8, 32, 16), BF16, BF16, [(70, 1)], [(17, 4)], 1, 64),
        (TINY, F32, F32, [], [(0, 21)], 1, 16),
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
) -> None:
    torch.manual_seed(0)
    case = LatentCase.make(sizes, decode, chunks, dtype, cache, CPU, block=block, interleaved=cache is not FP8)
    case.check(max_queries=queries, is_captured=bool(decode))


@interpreted
def test_passes_over_cached_tokens_in_the_interpreter(rounding: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    torch.manual_seed(0)
    monkeypatch.setattr(worklist, "MAX_EXPANDED_HEADS", 2 * 16 * 6)  # two blocks in each pass
    case = LatentCase.make(TINY, [(20, 1)], [(37, 3), (0, 2), (16, 4), (3, 1)], F32, F32, CPU, block=16)
    assert len(case.make_plan(has_passes=True).latent.context_passes) == 3
    case.check(has_passes=True)


@compiled
def test_latent_kernels_compile(compiled_kernels: list[Any]) -> None:  # noqa: F811
    case = LatentCase.make(LITE, [(63, 1)], [(64, 2)], BF16, BF16, CPU)
    for has_passes in (False, True):
        plan = case.make_plan(has_passes=has_passes)
        latent_attention(case.inputs, plan, None, lambda x, layer: x.new_empty(len(x), layer.weight.n))
    assert len(compiled_kernels) == 14
    assert sum("mma" in kernel.asm["ptx"] for kernel in compiled_kernels) == 11, "all but merges and copies"
