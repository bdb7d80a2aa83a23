"""Limits of kernels that memory plans also use: work of decode rows, and shapes of products.

This module needs no numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator

CTAS_PER_SM = 2  # CTAs, and so parts, that a multiprocessor (SM) computes at the same time
MAX_ROW_HEADS = 32  # queries of a decode row times query heads per KV head
MAX_HEADS_OF_SMALL_CTA = 16  # rows with more of these take a CTA of twice the size, of which an SM computes one
MAX_SMALL_HEAD_DIM = 128  # the sums of larger heads leave room for only one CTA on an SM
MAX_LATENT_PAIRS = 64  # pairs (query, head) of a program of latent attention, whose sums fit into registers
MAX_EXPANDED_HEADS = 1 << 18  # cached tokens times heads for which latent attention has keys and values at a time
# Rows of gate that alternate with as many rows of up on a GPU, so that a kernel computes both factors of an output.
GATE_GROUP_ROWS = 16
MIN_GEMM_ROWS, MAX_GEMM_ROWS = 129, 32768  # rows of x that cuda/gemm.py multiplies, also with silu(gate) * up
GEMM_ROW_GRAIN, GEMM_COLUMN_GRAIN = 64, 64  # of its weights
FP8_ROW_GRAIN, FP8_COLUMN_GRAIN, MAX_FP8_COLUMNS = 64, 16, 32768  # of float8 weights, whose inputs are quantised
# Tiles of rows sorted by expert, for bf16 weights, uw12 weights and 4-bit codes: pairs (most rows of an expert on
# average, rows of a tile). 0: kernels that leave no places in tiles unused. The fastest of some, measured on an H200.
PLAIN_TILE_ROWS = ((96.0, 0), (320.0, 256), (math.inf, 0))
PACKED_TILE_ROWS = ((12.0, 32), (52.0, 64), (96.0, 128), (math.inf, 256))
INT4_TILE_ROWS = ((16.0, 0), (24.0, 32), (48.0, 64), (math.inf, 128))
FLOAT4_TILE_ROWS = ((8.0, 0), (24.0, 32), (48.0, 64), (math.inf, 128))
MAX_TILE_ROWS, GATHERED_TILE_ROWS = 256, 32  # the largest tiles, and those whose rows kernels fetch one by one
MAX_UNPACKED_WEIGHTS = 8192 * 4096  # elements of an output head that are unpacked at a time, at most
MAX_DEQUANTISED_WEIGHTS = 8192 * 4096  # elements of a quantised matrix that are dequantised at a time, at most
MAX_GATHERED_LOGITS = 64  # rows whose logits ranks exchange at a time, in steps that are not captured
# Pairs (row of x, one of its experts) of a pass of a mixture: each pass reads the weights of the experts again. 65,536
# pairs of Qwen3-30B-A3B, with bf16 weights, take 1.16 ms on an H200 (534 TFLOP/s), and reading the 1.21 GB of a layer
# takes 0.29 ms (4.2 TB/s). With 327,680 pairs, 2,560 for each of 128 experts, reading it again takes 5 % of the time of
# the products, and less as far as weights are read while others are multiplied, or are smaller than bf16.
MIN_EXPERT_PAIRS, PAIRS_PER_EXPERT = 5 << 16, 2560
PASS_ROW_GRAIN = 128  # the rows of every pass but the last are a multiple of this
# A place is a position of a row in the tiles of sorted rows. Products with 4-bit codes copy their inputs to this many
# places at a time: enough for 1,152 tokens of Kimi K2.5, so steps with few prompt tokens are computed in one part.
MAX_COPIED_PLACES = 24 << 10


def max_work_items(rows: int, kv_heads: int, num_sms: int) -> int:
    """Return an upper bound of the work items of `rows` rows of any lengths.

    Each row has one item, and cutting adds more. The maximum part size is at least about a quarter of a CTA's fair
    share of all tiles, which bounds the number of cuts.
    """
    return rows + -(-5 * CTAS_PER_SM * num_sms // kv_heads)


def list_row_queries(max_queries: int, group: int, head_dim: int) -> tuple[int, ...]:
    """Return, in ascending order, the numbers of queries per row for which decode rows are planned.

    They are `max_queries` and, if it is smaller, the most queries of a row that a small CTA can compute. An SM runs
    twice as many small CTAs as large ones. `group`: query heads per KV head."""
    small = MAX_HEADS_OF_SMALL_CTA // group
    return (small, max_queries) if 1 < small < max_queries and head_dim <= MAX_SMALL_HEAD_DIM else (max_queries,)


def max_latent_queries(heads: int) -> int:
    """Return the most queries that a decode row of latent attention may have.

    Scratch memory is allocated for this number."""
    return max(2, MAX_ROW_HEADS // heads)


def count_latent_programs(pairs: int) -> int:
    """Return how many programs compute a work item of latent attention with this many pairs (query, head)."""
    return -(-pairs // MAX_LATENT_PAIRS)


def max_latent_items(rows: int, heads: int, num_sms: int) -> int:
    """Return an upper bound of the work items of `rows` decode rows of latent attention."""
    return max_work_items(rows, count_latent_programs(heads), num_sms)


def max_latent_places(rows: int, heads: int, num_sms: int) -> int:
    """Return how many partial results latent attention has memory for: one for each item, and one for each row."""
    return max_latent_items(rows, heads, num_sms) + rows


def max_pass_rows(experts: int, experts_per_row: int) -> int:
    """Return the maximum rows of x that one pass over the experts computes."""
    rows = max(MIN_EXPERT_PAIRS, PAIRS_PER_EXPERT * experts) // experts_per_row
    return max(1, rows // PASS_ROW_GRAIN) * PASS_ROW_GRAIN


def split_evenly(count: int, limit: int, grain: int = 1) -> Iterator[slice]:
    """Yield slices of at most `limit` of `count` items: as few as possible, and about equal.

    The sizes of all but the last are multiples of `grain`, of which `limit` must be a multiple too."""
    if count <= limit:
        yield slice(0, count)
        return
    size = -(-count // -(-count // limit))
    size = -(-size // grain) * grain
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def can_use_gemm(n: int, k: int) -> bool:
    """Return whether cuda/gemm.py multiplies by bf16 weights of this shape."""
    return n > 0 and n % GEMM_ROW_GRAIN == 0 and k > 0 and k % GEMM_COLUMN_GRAIN == 0


def supports_fp8_shape(n: int, k: int) -> bool:
    """Return whether GPU kernels multiply inputs quantised to float8 by float8 weights of this shape."""
    return n > 0 and n % FP8_ROW_GRAIN == 0 and 0 < k <= MAX_FP8_COLUMNS and k % FP8_COLUMN_GRAIN == 0
