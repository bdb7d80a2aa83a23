"""linear: computes y = x w^T for hundreds or thousands of rows of x, where both x and w are float8.

`gemm.cu` has the kernel: that of `cuda/gemm.py`, with twice as many columns (k) in a step. If the weight has scales of
blocks, the sums of each step need registers of their own, so tiles are narrower.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda import gemm
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.fp8_weight import UNIT_K, FP8Weight, supports_shape
from emberline.kernels.cuda.gemm import EPILOGUES, PANEL_SIZE, THREADS, TILE_ROWS, GemmPlan
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, SLOT_K, choose_epilogue
from emberline.kernels.cuda.quantise_rows import QuantisedRows

FILE = gemm.FILE
MAX_ROWS = gemm.MAX_ROWS
MAX_BLOCK_WIDTH = 128  # rows of w in a tile, if the weight has scales of blocks
# Pairs (most rows of x, rows of tiles that are computed column by column): fewer tiles if x takes much of the L2.
BANDS = ((4096, 8), (MAX_ROWS, 4))
LAG_STEPS, MAX_LAG_ROWS = 2, 512  # steps by which one warpgroup is behind the other, in wide tiles of few rows of x


def kernel_name(plan: GemmPlan, epilogue: str, has_blocks: bool) -> str:
    return f"gemm_fp8<{plan.width}, {plan.cluster}, {epilogue}, {'FP8_BLOCKS' if has_blocks else 'FP8_ROWS'}>"


def supports(m: int, n: int, k: int) -> bool:
    return 1 <= m <= MAX_ROWS and supports_shape(n, k)


def linear(
    x: QuantisedRows,
    w: FP8Weight,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: GemmPlan | None = None,
) -> Tensor:
    """Write x w^T into `out` (bf16) and return it; the arguments are those of `cuda.gemm.linear`."""
    m, k = x.codes.shape
    assert supports(m, w.n, k) and k == w.k and (x.scales.dim() == 2) is w.has_blocks
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.dtype is torch.bfloat16
    assert all(t.data_ptr() % 16 == 0 for t in (out, residual) if t is not None)
    epilogue = choose_epilogue(out, residual, gated)
    plan = plan or choose_plan(m, w.n, k, has_blocks=w.has_blocks)
    assert plan.width <= MAX_BLOCK_WIDTH or not w.has_blocks
    outputs = make_tensor_map(out, (PANEL_SIZE, PANEL_SIZE))
    _get_kernel(kernel_name(plan, epilogue, w.has_blocks))(
        (plan.cluster * min(count_sms() // plan.cluster, plan.count_tiles(m, w.n)), 1, 1),
        THREADS,
        (
            make_tensor_map(x.codes, (TILE_ROWS, UNIT_K)),
            w.get_tensor_map(plan.width // plan.cluster // 16),
            outputs,
            outputs if residual is None else make_tensor_map(residual, (TILE_ROWS, PANEL_SIZE)),
            *(m, w.n, k, plan.band, plan.lag, int(pdl)),
            w.scales,
            *(x.scales, x.scales.stride(0)),
        ),
        pdl=pdl,
        cluster=plan.cluster,
        shared_bytes=plan.shared_bytes,
    )
    return out


@cache
def choose_plan(m: int, n: int, k: int, *, has_blocks: bool = False) -> GemmPlan:
    """Return the plan with the least estimated time.

    The estimate is that of a bf16 weight with half as many columns (k), which has as many bytes."""
    plans = [plan for plan in gemm.PLANS if not has_blocks or plan.width <= MAX_BLOCK_WIDTH]
    best = min(plans, key=lambda plan: gemm.estimate_us(plan, m, n, -(-k // UNIT_K) * SLOT_K))
    lag = LAG_STEPS if m <= MAX_LAG_ROWS and best.width > MAX_BLOCK_WIDTH else 0
    return replace(best, band=next(band for rows, band in BANDS if m <= rows), lag=lag)


VARIANTS = tuple(
    kernel_name(plan, epilogue, has_blocks)
    for plan, epilogue, has_blocks in product(gemm.PLANS, EPILOGUES, (False, True))
    if plan.width <= MAX_BLOCK_WIDTH or not has_blocks
)


@cache
def _get_kernel(name: str) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use."""
    return CudaModule(FILE, [name]).kernel(name, MAX_SHARED_BYTES)
