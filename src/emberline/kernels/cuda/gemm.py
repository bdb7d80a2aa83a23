"""linear: computes y = x w^T, with a fused epilogue, for more rows of x than `cuda/wide.py` supports.

`gemm.cu` has the kernel. A row's result is the same, bit for bit, for any number of rows, any index of the row
and any plan without a split of k. With a split, it has the same bits as `cuda/wide.py` with that split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, SLOT_K, BF16Weight, choose_epilogue
from emberline.kernels.work_limits import MAX_GEMM_ROWS, MIN_GEMM_ROWS, can_use_gemm

FILE = "gemm.cu"
MIN_ROWS, MAX_ROWS = MIN_GEMM_ROWS, MAX_GEMM_ROWS
EPILOGUES = ("STORE", "ADD", "GATED")
TILE_ROWS, THREADS, PANEL_SIZE = (
    128,
    384,
    64,
)  # as in gemm.cu: rows of a CTA's tile, threads, rows and columns of a panel
STAGES_BY_WIDTH = {256: 4, 128: 6}  # rows of w in a tile: stages of the shared-memory pipeline
CLUSTER_SIZES = (2, 1)  # CTAs of a cluster, which share their rows of w
BAND_TILE_ROWS, LAG_STEPS = 8, 1
# Limits of a plan: FLOP per microsecond of one SM, bytes per microsecond from the L2, and fixed time per tile.
SM_FLOP_PER_US, L2_BYTES_PER_US, TILE_OVERHEAD_US = 5.6e6, 7.0e6, 1.0


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The tile sizes and the order of tiles with which a product of one shape is computed."""

    width: int  # rows of w in a CTA's tile
    cluster: int  # CTAs of a cluster
    band: int = BAND_TILE_ROWS  # rows of tiles that are computed column by column
    lag: int = LAG_STEPS  # steps of k by which one warpgroup is behind the other
    split: int = 0  # parts of k whose sums are added in order, as in wide.cu; 0: sums step by step, without a bias

    def kernel_name(self, epilogue: str) -> str:
        return f"gemm<{self.width}, {self.cluster}, {epilogue}{', true' if self.split else ''}>"

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of the pipeline."""
        return 128 * (TILE_ROWS + self.width)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: pipeline, output panels, barriers, and padding for alignment."""
        stages = STAGES_BY_WIDTH[self.width]
        return 1024 + stages * (self.stage_bytes + 16) + 4 * 2 * PANEL_SIZE * PANEL_SIZE

    def count_tiles(self, m: int, n: int) -> int:
        """Return the number of tiles, each computed by one cluster of CTAs, that cover an m x n product."""
        return -(-m // (TILE_ROWS * self.cluster)) * -(-n // self.width)


PLANS = tuple(GemmPlan(width, ctas) for width, ctas in product(STAGES_BY_WIDTH, CLUSTER_SIZES))
FIXED_ORDER_PLANS = tuple(replace(plan, split=1) for plan in PLANS)
VARIANTS = tuple(plan.kernel_name(epilogue) for plan, epilogue in product(PLANS + FIXED_ORDER_PLANS, EPILOGUES))


def supports(m: int, n: int, k: int) -> bool:
    return MIN_ROWS <= m <= MAX_ROWS and can_use_gemm(n, k)


def linear(
    x: Tensor,
    w: BF16Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: GemmPlan | None = None,
) -> Tensor:
    """Write x w^T into `out` (bf16) and return it.

    `residual` is added to the product and may be `out` itself. With `gated`, the result is silu(gate) * up, [m, n / 2].
    `plan` overrides the chosen plan. `bias`, float32 [n], needs a plan with a split, and is not supported if `gated`.
    """
    m, k = x.shape
    assert supports(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.dtype is torch.bfloat16
    assert all(t.data_ptr() % 16 == 0 for t in (x, out, residual) if t is not None)
    epilogue = choose_epilogue(out, residual, gated)
    plan = plan or choose_plan(m, w.n, k)
    assert plan.split <= (1 if plan.width > 128 else k // (2 * SLOT_K)) or plan.split == 1, "too many parts of k"
    assert bias is None or (plan.split and not gated and bias.dtype is torch.float32 and bias.shape == (w.n,))
    assert plan.band > 0 and plan.lag < STAGES_BY_WIDTH[plan.width], "the warpgroup that is ahead needs free stages"
    outputs = make_tensor_map(out, (PANEL_SIZE, PANEL_SIZE))
    _get_kernel(plan.kernel_name(epilogue))(
        (plan.cluster * min(count_sms() // plan.cluster, plan.count_tiles(m, w.n)), 1, 1),
        THREADS,
        (
            make_tensor_map(x, (TILE_ROWS, SLOT_K)),
            w.get_tensor_map(plan.width // plan.cluster // 16),
            outputs,
            outputs if residual is None else make_tensor_map(residual, (TILE_ROWS, PANEL_SIZE)),
            *(m, w.n, k, plan.band, plan.lag, int(pdl), plan.split, bias),
        ),
        pdl=pdl,
        cluster=plan.cluster,
        shared_bytes=plan.shared_bytes,
    )
    return out


@cache
def choose_plan(m: int, n: int, k: int, split: int = 0) -> GemmPlan:
    """Return the plan with the least estimated time. The bits of the result depend on nothing but `split`."""
    plans = [replace(plan, split=split) for plan in PLANS if split < 2 or plan.width == 128]
    return min(plans, key=lambda plan: estimate_us(plan, m, n, k))


def estimate_us(plan: GemmPlan, m: int, n: int, k: int) -> float:
    """Return the estimated time in microseconds, limited by arithmetic or by L2 cache bandwidth.

    Reads from device memory are assumed not to be a limit.
    """
    tiles, clusters = plan.count_tiles(m, n), count_sms() // plan.cluster
    busy_ctas = min(tiles, clusters) * plan.cluster
    fetched_bytes = plan.stage_bytes - 128 * plan.width * (plan.cluster - 1) // plan.cluster
    step = max(2 * TILE_ROWS * plan.width * SLOT_K / SM_FLOP_PER_US, busy_ctas * fetched_bytes / L2_BYTES_PER_US)
    return -(-tiles // clusters) * (k // SLOT_K * step + TILE_OVERHEAD_US)


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name.

    It is compiled on first use, because a model needs only a few kernels.
    """
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)
