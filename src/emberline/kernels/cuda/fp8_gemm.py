"""linear: computes y = x w^T for hundreds or thousands of rows of x, where both x and w are float8.

`gemm.cu` has the kernel: that of `cuda/gemm.py`, with twice as many columns (k) in a step. The tensor cores keep few
bits of sums of float8 products. A promoting plan adds the sums of each 128 columns in float32, which takes more
registers, so its tiles are narrower.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda import gemm
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, make_tensor_map
from emberline.kernels.cuda.fp8_weight import UNIT_K, FP8Weight
from emberline.kernels.cuda.gemm import CLUSTER_SIZES, EPILOGUES, PANEL_SIZE, THREADS, TILE_ROWS, GemmPlan
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, NUM_SMS, SLOT_K, choose_epilogue
from emberline.kernels.cuda.quantise_rows import QuantisedRows

FILE = gemm.FILE
MAX_ROWS = gemm.MAX_ROWS
PROMOTING_WIDTH = 128  # rows of w in a tile of a promoting plan


@dataclass(frozen=True, slots=True)
class FP8GemmPlan:
    tiles: GemmPlan
    promotes: bool

    def kernel_name(self, epilogue: str, has_blocks: bool) -> str:
        numbers = "FP8_BLOCKS" if has_blocks else "FP8_PROMOTED_ROWS" if self.promotes else "FP8_ROWS"
        return f"gemm_fp8<{self.tiles.width}, {self.tiles.cluster}, {epilogue}, {numbers}>"


def supports(m: int, n: int, k: int) -> bool:
    return 1 <= m <= MAX_ROWS and n > 0 and n % 64 == 0 and k > 0 and k % 16 == 0


def linear(
    x: QuantisedRows,
    w: FP8Weight,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: FP8GemmPlan | None = None,
) -> Tensor:
    """Write x w^T into `out` (bf16) and return it; the arguments are those of `cuda.gemm.linear`."""
    m, k = x.codes.shape
    assert supports(m, w.n, k) and k == w.k and (x.scales.dim() == 2) is w.has_blocks
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.dtype is torch.bfloat16
    assert all(t.data_ptr() % 16 == 0 for t in (out, residual) if t is not None)
    epilogue = choose_epilogue(out, residual, gated)
    plan = plan or choose_plan(m, w.n, k, promotes=w.has_blocks)
    assert plan.promotes or not w.has_blocks
    outputs = make_tensor_map(out, (PANEL_SIZE, PANEL_SIZE))
    tiles = plan.tiles
    _get_kernel(plan.kernel_name(epilogue, w.has_blocks))(
        (tiles.cluster * min(NUM_SMS // tiles.cluster, tiles.count_tiles(m, w.n)), 1, 1),
        THREADS,
        (
            make_tensor_map(x.codes, (TILE_ROWS, UNIT_K)),
            w.get_tensor_map(tiles.width // tiles.cluster // 16),
            outputs,
            outputs if residual is None else make_tensor_map(residual, (TILE_ROWS, PANEL_SIZE)),
            *(m, w.n, k, tiles.band, tiles.lag, int(pdl)),
            w.scales,
            *(x.scales, x.scales.stride(0)),
        ),
        pdl=pdl,
        cluster=tiles.cluster,
        shared_bytes=tiles.shared_bytes,
    )
    return out


@cache
def choose_plan(m: int, n: int, k: int, *, promotes: bool) -> FP8GemmPlan:
    """Return the plan with the least estimated time."""
    tiles = [plan for plan in gemm.PLANS if not promotes or plan.width == PROMOTING_WIDTH]
    best = min(tiles, key=lambda plan: gemm.estimate_us(plan, m, n, -(-k // UNIT_K) * SLOT_K))
    return FP8GemmPlan(best, promotes)


PLANS = tuple(
    FP8GemmPlan(GemmPlan(width, cluster), promotes)
    for (width, promotes), cluster in product(((256, False), (128, False), (PROMOTING_WIDTH, True)), CLUSTER_SIZES)
)
VARIANTS = tuple(
    plan.kernel_name(epilogue, has_blocks)
    for plan, epilogue, has_blocks in product(PLANS, EPILOGUES, (False, True))
    if plan.promotes or not has_blocks
)


@cache
def _get_kernel(name: str) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use."""
    return CudaModule(FILE, [name]).kernel(name, MAX_SHARED_BYTES)
