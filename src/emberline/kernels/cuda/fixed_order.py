"""linear: computes y = x w^T with an order of sums that depends on nothing but the shape of the weight.

A row's result has the same bits for any number of rows, any index of the row, and plain and packed weights. k is cut
into `choose_split(n, k)` parts. Each part is summed by wgmma instructions in steps of 16, and the sums of the parts are
added in order. `cuda/wide.py` does this for up to 256 rows of x and reads the weight once. `cuda/gemm.py` does it for
more rows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda import gemm, wide
from emberline.kernels.cuda.driver import count_sms
from emberline.kernels.cuda.linear import SLOT_K, BF16Weight
from emberline.kernels.cuda.uw12 import UW12Weight
from emberline.kernels.cuda.wide import TileConfig, WidePlan

TILE_ROWS = 64  # rows of w that a warpgroup computes
MIN_PART_SLOTS = 2  # steps of 64 k in a part of k: gemm.cu starts its second warpgroup after the first step


def supports(n: int, k: int) -> bool:
    """Return whether `linear` supports a bf16 weight of this shape."""
    return n > 0 and n % TILE_ROWS == 0 and k > 0 and k % SLOT_K == 0


def choose_split(n: int, k: int) -> int:
    """Return the number of parts of k: more for weights with few rows, which would occupy few SMs otherwise.

    The number must not depend on anything else, because it determines the last bits of the result.
    """
    tiles = n // TILE_ROWS
    split = 4 if 4 * tiles <= count_sms() else 2 if tiles <= count_sms() else 1
    return max(1, min(split, k // SLOT_K // MIN_PART_SLOTS))


def linear(
    x: Tensor,
    w: BF16Weight | UW12Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
) -> Tensor:
    """Write x w^T into `out` and return it; the arguments are those of `cuda.linear.linear`.

    If the weight is packed, or `cuda/gemm.py` does not support the output (float32, or gated with a bias), more than
    `wide.MAX_ROWS` rows are computed in slices, each of which reads the whole weight.
    """
    m, k = x.shape
    has_gemm = out.dtype is torch.bfloat16 and not (gated and bias is not None)
    if m > wide.MAX_ROWS and has_gemm and isinstance(w, BF16Weight):
        plan = gemm.choose_plan(m, w.n, k, choose_split(w.n, k))
        return gemm.linear(x, w, out=out, bias=bias, residual=residual, gated=gated, pdl=pdl, plan=plan)
    packed = isinstance(w, UW12Weight)
    for first in range(0, m, wide.MAX_ROWS):
        part = slice(first, min(m, first + wide.MAX_ROWS))
        wide.linear(
            x[part], w, out=out[part], bias=bias, residual=None if residual is None else residual[part], gated=gated,
            pdl=pdl, plan=choose_wide_plan(part.stop - first, w.n, k, packed=packed),
        )  # fmt: skip
    return out


def choose_wide_plan(m: int, n: int, k: int, *, packed: bool) -> WidePlan:
    """Return the fastest plan for `cuda/wide.py` with the fixed split; m is at most `wide.MAX_ROWS`."""
    return _choose_wide_plan(wide.choose_tile_columns(m, packed=packed), n, k, packed)


@cache
def _choose_wide_plan(min_columns: int, n: int, k: int, packed: bool) -> WidePlan:
    split, measured = choose_split(n, k), wide.MEASURED_PACKED if packed else wide.MEASURED
    # Tiles of 32 columns have many rows of w, so that there may be too few of them for all SMs.
    sizes = (min_columns, wide.COLUMNS[0]) if min_columns == wide.FEW_COLUMNS else (min_columns,)
    plans = []
    for columns in sizes:
        config = measured.get((columns, n, k))
        if config is not None and config.split == split and not config.unclustered:
            plans.append(wide.make_plan(columns, n, k, config, packed=packed))
        else:
            plans += _make_plans(columns, n, k, split, packed)
    return min(plans, key=lambda plan: wide.estimate_us(plan, n, k))


def _make_plans(columns: int, n: int, k: int, split: int, packed: bool) -> list[WidePlan]:
    """Return a plan for each tile size; if possible, only plans whose clusters all run at the same time."""
    found: list[tuple[bool, WidePlan]] = []
    for groups, tile_columns in wide.PACKED_TILES if packed else wide.PLAIN_TILES:
        if tile_columns != columns:
            continue
        allows_two_ctas = packed and groups <= 2 and groups * columns <= wide.MAX_SIZE_OF_TWO_CTAS
        for ctas_per_sm in (1, 2) if allows_two_ctas else (1,):
            for share in wide.SHARES if wide.is_large(columns) else (1,):
                config = TileConfig(groups, split, ctas_per_sm, share)
                plan = wide.make_plan(columns, n, k, config, packed=packed)
                max_ctas = ctas_per_sm * plan.cluster * wide.MAX_CLUSTERS[plan.cluster]
                found.append((split == 1 or plan.grid <= max_ctas, plan))
    fitting = [plan for fits, plan in found if fits]
    return fitting or [plan for _, plan in found]
