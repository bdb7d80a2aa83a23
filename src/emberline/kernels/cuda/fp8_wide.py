"""linear: computes y = x w^T for dozens of rows of x, where both x and w are float8.

`wide.cu` has the kernel: that of `cuda/wide.py`, with twice as many columns (k) in a step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda import wide
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.fp8_weight import UNIT_K, FP8Weight, supports_shape
from emberline.kernels.cuda.linear import EPILOGUES, MAX_SHARED_BYTES, SLOT_K, choose_epilogue
from emberline.kernels.cuda.quantise_rows import QuantisedRows
from emberline.kernels.cuda.wide import TileConfig, WidePlan

FILE = wide.FILE
# Columns of a tile (rows of x), and the numbers of warpgroups for which registers suffice. With scales of blocks, the
# sums of each step need registers of their own.
GROUPS_BY_COLUMNS = {32: (1, 2), 64: (1, 2), 96: (1, 2), 128: (1, 2), 256: (2,)}
BLOCK_GROUPS_BY_COLUMNS = {32: (1, 2), 64: (1, 2), 128: (1, 2)}
MAX_ROWS, MAX_BLOCK_ROWS = 256, 128
# (columns, n, k) for which a sweep on an H200 found a better plan than the estimate.
MEASURED: dict[tuple[int, int, int], TileConfig] = {
    (32, 6144, 4096): TileConfig(1),
    (64, 6144, 4096): TileConfig(1),
    (96, 6144, 4096): TileConfig(1),
    (128, 6144, 4096): TileConfig(2, 2),
    (256, 6144, 4096): TileConfig(2, 2),
    (32, 4096, 4096): TileConfig(1, 2, ctas_per_sm=2),
    (64, 4096, 4096): TileConfig(1, 2),
    (96, 4096, 4096): TileConfig(1, 2),
    (128, 4096, 4096): TileConfig(1, 2),
    (256, 4096, 4096): TileConfig(2, 3),
    (32, 28672, 4096): TileConfig(1, ctas_per_sm=2),
    (64, 28672, 4096): TileConfig(2),
    (96, 28672, 4096): TileConfig(2),
    (128, 28672, 4096): TileConfig(2),
    (256, 28672, 4096): TileConfig(2, share=2),
    (32, 4096, 14336): TileConfig(1, 2),
    (64, 4096, 14336): TileConfig(1, 2),
    (96, 4096, 14336): TileConfig(1, 2),
    (128, 4096, 14336): TileConfig(1, 2),
    (256, 4096, 14336): TileConfig(2, 4, unclustered=True),
}


def kernel_name(plan: WidePlan, has_blocks: bool) -> str:
    return f"wide_fp8<{plan.groups}, {plan.columns}, {str(has_blocks).lower()}>"


VARIANTS = tuple(
    kernel_name(WidePlan(groups, columns, 1, 1, 1), has_blocks)
    for has_blocks, tiles in ((False, GROUPS_BY_COLUMNS), (True, BLOCK_GROUPS_BY_COLUMNS))
    for columns, counts in tiles.items()
    for groups in counts
)


def supports(m: int, n: int, k: int, *, has_blocks: bool = False) -> bool:
    return 1 <= m <= (MAX_BLOCK_ROWS if has_blocks else MAX_ROWS) and supports_shape(n, k)


def linear(
    x: QuantisedRows,
    w: FP8Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: WidePlan | None = None,
    exchange_polls: int = wide.EXCHANGE_POLLS,
) -> Tensor:
    """Write x w^T into `out` and return it; the arguments are those of `cuda.wide.linear`."""
    m, k = x.codes.shape
    assert supports(m, w.n, k, has_blocks=w.has_blocks) and k == w.k and (x.scales.dim() == 2) is w.has_blocks
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.data_ptr() % 16 == 0
    assert residual is None or residual.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = EPILOGUES.index(choose_epilogue(out, residual, gated))
    columns = choose_tile_columns(m, has_blocks=w.has_blocks)
    plan = plan or choose_plan(columns, w.n, k, gated=gated, has_blocks=w.has_blocks)
    assert plan.columns >= m and plan.split <= -(-k // UNIT_K) and plan.stages >= max(2, plan.min_stages)
    assert not plan.unclustered or (plan.can_exchange_sums and not gated)
    exchange = wide.get_exchange_memory(x.codes.device) if plan.unclustered else (None, None)
    _get_kernel(kernel_name(plan, w.has_blocks))(
        (plan.grid, 1, 1),
        plan.threads,
        (
            w.get_tensor_map(4 * plan.groups, paired=gated),
            make_tensor_map(x.codes, (-(-m // (8 * plan.share)) * 8, UNIT_K)),
            w.scales,
            *(x.scales, x.scales.stride(0)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.split, plan.share, epilogue, int(pdl)),
            *(*exchange, exchange_polls),
        ),
        pdl=pdl,
        cluster=plan.cluster,
        shared_bytes=plan.shared_bytes,
    )
    return out


def choose_tile_columns(m: int, *, has_blocks: bool = False) -> int:
    sizes = BLOCK_GROUPS_BY_COLUMNS if has_blocks else GROUPS_BY_COLUMNS
    return next(columns for columns in sizes if columns >= m)


@cache
def choose_plan(columns: int, n: int, k: int, *, gated: bool = False, has_blocks: bool = False) -> WidePlan:
    """Return the measured plan for this shape, or else the plan with the least estimated time."""
    counts = (BLOCK_GROUPS_BY_COLUMNS if has_blocks else GROUPS_BY_COLUMNS)[columns]
    config = MEASURED.get((columns, n, k))
    if config is not None and config.groups in counts and not (config.unclustered and gated):
        return make_plan(columns, n, k, config)
    configs = (TileConfig(groups, split) for groups, split in product(counts, wide.SPLITS))
    plans = [make_plan(columns, n, k, config) for config in configs if config.split <= -(-k // UNIT_K)]
    fitting = [plan for plan in plans if plan.split == 1 or plan.grid <= plan.cluster * wide.MAX_CLUSTERS[plan.cluster]]
    return min(fitting, key=lambda plan: wide.estimate_us(plan, n, -(-k // UNIT_K) * SLOT_K))


def make_plan(columns: int, n: int, k: int, config: TileConfig) -> WidePlan:
    """Return the plan for a tile configuration.

    It is the plan for a bf16 weight with half as many columns (k), which has as many bytes, with at least two
    stages."""
    plan = wide.make_plan(columns, n, -(-k // UNIT_K) * SLOT_K, config)
    assert plan.grid <= config.ctas_per_sm * count_sms() or config.split > 1
    return replace(plan, stages=max(2, plan.stages))


@cache
def _get_kernel(name: str) -> CudaKernel:
    return CudaModule(FILE, [name]).kernel(name, MAX_SHARED_BYTES)
