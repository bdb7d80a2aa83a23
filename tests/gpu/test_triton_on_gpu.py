"""The Triton kernels on a GPU, in the shapes models have and in awkward ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton_cases
from triton_cases import BF16, F32, FP8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rows", [1, 64, 527, 3001])
@pytest.mark.parametrize("columns", [4096, 576, 100])
@pytest.mark.parametrize("pdl", [False, True])
def test_norm(dtype: torch.dtype, rows: int, columns: int, pdl: bool) -> None:
    triton_cases.check_norm(GPU, dtype, rows, columns, pdl=pdl)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rows", [1, 67, 500])
@pytest.mark.parametrize("columns,group", [(14336, 16), (14336, None), (1536, 16), (100, None)])
@pytest.mark.parametrize("pdl", [False, True])
def test_silu(dtype: torch.dtype, rows: int, columns: int, group: int | None, pdl: bool) -> None:
    triton_cases.check_silu(GPU, dtype, rows, columns, group, pdl=pdl)


@pytest.mark.parametrize("dtype,cache", [(BF16, BF16), (BF16, FP8), (F32, F32), (F32, BF16), (F32, FP8)])
@pytest.mark.parametrize("tokens", [1, 64, 777])
@pytest.mark.parametrize(
    "heads,rotary", [((32, 8, 128), 128), ((9, 3, 64), 64), ((32, 8, 96), 72), ((4, 2, 20), 20), ((5, 1, 8), 8)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope(
    dtype: torch.dtype, cache: torch.dtype, tokens: int, heads: tuple[int, int, int], rotary: int, normed: bool
) -> None:
    triton_cases.check_rope(GPU, dtype, cache, tokens, heads, rotary, normed=normed, block=64, pdl=normed)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("heads,rotary", [((32, 8, 128), 128), ((9, 3, 64), 32), ((4, 1, 256), 0)])
def test_interleaved_and_absent_rope(dtype: torch.dtype, heads: tuple[int, int, int], rotary: int) -> None:
    triton_cases.check_rope(GPU, dtype, dtype, 77, heads, rotary, interleaved=rotary > 0, block=64, pdl=True)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("groups,width", [(1, 4096), (1, 100), (32, 128)])
def test_layer_norm(dtype: torch.dtype, groups: int, width: int) -> None:
    triton_cases.check_layer_norm(GPU, dtype, 67, groups, width, pdl=True)


@pytest.mark.parametrize("dtype,cache", [(BF16, BF16), (F32, F32), (BF16, FP8), (F32, BF16)])
def test_nan_and_inf(dtype: torch.dtype, cache: torch.dtype) -> None:
    triton_cases.check_nan_and_inf(GPU, dtype, cache)


RAGGED = [(0, 1), (70, 1), (0, 40), (63, 1), (64, 130), (300, 3), (1000, 1), (511, 257)]
DECODE = [(0, 1), (1, 1), (15, 1), (63, 1), (64, 1), (2000, 1), (777, 1)]
TYPES = [(BF16, BF16), (BF16, FP8), (F32, F32), (F32, BF16), (F32, FP8)]


@pytest.mark.parametrize("dtype,cache", TYPES)
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (4, 4, 96), (7, 1, 20), (6, 2, 8)])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["ragged", "decode"])
def test_attention(
    dtype: torch.dtype,
    cache: torch.dtype,
    heads: tuple[int, int, int],
    window: int,
    lengths: list[tuple[int, int]],
) -> None:
    triton_cases.check_attention(GPU, dtype, cache, lengths, heads, window=window)


@pytest.mark.parametrize("dtype,cache", TYPES)
@pytest.mark.parametrize("heads", [(8, 4, 256), (16, 8, 128)])
@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["ragged", "decode"])
def test_capped_attention(
    dtype: torch.dtype, cache: torch.dtype, heads: tuple[int, int, int], lengths: list[tuple[int, int]]
) -> None:
    triton_cases.check_attention(GPU, dtype, cache, lengths, heads, window=50, softcap=5.0)


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("queries", [1, 2, 16, 32])
def test_attention_with_any_block_and_tile_size(cache: torch.dtype, block: int, queries: int) -> None:
    triton_cases.check_attention(GPU, BF16, cache, RAGGED, (32, 8, 128), block=block, tile_queries=queries, pdl=True)


@pytest.mark.parametrize("window", [0, 1, 64, 1500])
def test_attention_over_a_long_context(window: int) -> None:
    triton_cases.check_attention(GPU, BF16, BF16, [(9000, 1), (8191, 65), (4000, 1)], (8, 2, 128), window=window)


@pytest.mark.parametrize("m", [1, 16, 17, 40, 64])
@pytest.mark.parametrize(
    ("n", "k", "split", "kind", "group"),
    [
        (6144, 4096, 0, "bias", 0),
        (4096, 4096, 0, "residual", 0),
        (4096, 14336, 0, "residual", 0),
        (28672, 4096, 0, "", 16),
        (1056, 1000, 0, "", 16),
        (33000, 576, 0, "float32", 0),
        (1000, 584, 5, "bias", 0),
    ],
)
def test_few_rows(m: int, n: int, k: int, split: int, kind: str, group: int) -> None:
    triton_cases.check_few_rows(GPU, m, n, k, split=split, kind=kind, group=group, pdl=True)


@pytest.mark.parametrize("m", [1, 16, 17, 64])
@pytest.mark.parametrize(
    ("n", "k", "split", "kind", "group"),
    [
        (6144, 4096, 0, "bias", 0),
        (4096, 14336, 0, "residual", 0),
        (8192, 4096, 0, "", 16),
        (4096, 576, 0, "float32", 0),
        (1024, 1088, 5, "bias", 0),
    ],
)
def test_packed_rows(m: int, n: int, k: int, split: int, kind: str, group: int) -> None:
    triton_cases.check_packed_rows(GPU, m, n, k, split=split, kind=kind, group=group, pdl=True)


@pytest.mark.parametrize("count", [1, 256, 1000])
@pytest.mark.parametrize("pdl", [False, True])
def test_rows(count: int, pdl: bool) -> None:
    triton_cases.check_rows(GPU, count, pdl=pdl)


@pytest.mark.parametrize("rows,heads,size,dim", [(40, 8, 64, 128), (5, 3, 16, 64), (200, 1, 128, 128), (9, 2, 64, 80)])
@pytest.mark.parametrize("pdl", [False, True])
def test_widen(rows: int, heads: int, size: int, dim: int, pdl: bool) -> None:
    triton_cases.check_widen(GPU, rows, heads, size, dim, pdl=pdl)


@pytest.mark.parametrize("count", [1, 7, 129])
def test_cache_slots(count: int) -> None:
    triton_cases.check_cache_slots(GPU, count)
