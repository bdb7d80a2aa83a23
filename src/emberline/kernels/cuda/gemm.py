"""linear: y = x w^T for prompts, more rows of x than `wide` supports, with a fused epilogue; `gemm.cu` has the kernel.

A row's result does not depend on the number of rows, its index or the plan, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import Kernel, Module, tensor_map
from emberline.kernels.cuda.linear import SHARED_LIMIT, SMS, UNIT, Weight, epilogue_of

FILE = "gemm.cu"
LEAST_ROWS, MOST_ROWS = 129, 32768
EPILOGUES = ("STORE", "ADD", "GATED")
ROWS, THREADS, PANEL = 128, 384, 64  # as in gemm.cu: rows of a CTA's tile, threads, rows and columns of a panel
WIDTHS = {256: 4, 128: 6}  # rows of w in a tile: stages of the shared-memory pipeline
CTAS = (2, 1)  # CTAs of a cluster, which share their rows of w
BAND, LAG = 8, 1
# Limits of a plan: FLOP per microsecond of one SM, bytes per microsecond from the L2, and fixed time per tile.
RATE, L2_RATE, FINISH = 5.6e6, 7.0e6, 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape is computed. `band` and `lag` change only the order of the work."""

    width: int  # rows of w in a CTA's tile
    ctas: int  # CTAs of a cluster
    band: int = BAND  # rows of tiles that are computed column by column
    lag: int = LAG  # steps of k by which one warpgroup is behind the other

    def variant(self, epilogue: str) -> str:
        return f"gemm<{self.width}, {self.ctas}, {epilogue}>"

    @property
    def slot(self) -> int:
        """Bytes of one stage of the pipeline."""
        return 128 * (ROWS + self.width)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: pipeline, output panels, barriers, and padding for alignment."""
        stages = WIDTHS[self.width]
        return 1024 + stages * (self.slot + 16) + 4 * 2 * PANEL * PANEL

    def tiles(self, m: int, n: int) -> int:
        """Return the number of cluster tiles that cover an m x n product."""
        return -(-m // (ROWS * self.ctas)) * -(-n // self.width)


PLANS = tuple(Plan(width, ctas) for width, ctas in product(WIDTHS, CTAS))
VARIANTS = tuple(plan.variant(epilogue) for plan, epilogue in product(PLANS, EPILOGUES))


def supports(m: int, n: int, k: int) -> bool:
    return LEAST_ROWS <= m <= MOST_ROWS and n > 0 and n % 64 == 0 and k > 0 and k % UNIT == 0


def linear(
    x: Tensor,
    w: Weight,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: Plan | None = None,
) -> Tensor:
    """Write x w^T into `out` (bf16) and return it.

    `residual` is added and may be `out` itself. `gated`: silu(gate) * up, [m, n / 2]. `plan` overrides the choice for
    benchmarks.
    """
    m, k = x.shape
    assert supports(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.dtype is torch.bfloat16
    assert all(t.data_ptr() % 16 == 0 for t in (x, out, residual) if t is not None)
    epilogue = epilogue_of(out, residual, gated)
    plan = plan or choose(m, w.n, k)
    assert plan.band > 0 and plan.lag < WIDTHS[plan.width], "the warpgroup that is ahead needs free stages"
    outputs = tensor_map(out, (PANEL, PANEL))
    _kernel(plan.variant(epilogue))(
        (plan.ctas * min(SMS // plan.ctas, plan.tiles(m, w.n)), 1, 1),
        THREADS,
        (
            tensor_map(x, (ROWS, UNIT)),
            w.map(plan.width // plan.ctas // 16),
            outputs,
            outputs if residual is None else tensor_map(residual, (ROWS, PANEL)),
            *(m, w.n, k, plan.band, plan.lag, int(pdl)),
        ),
        pdl=pdl,
        cluster=plan.ctas,
        shared=plan.shared,
    )
    return out


@cache
def choose(m: int, n: int, k: int) -> Plan:
    """Return the plan with the least estimated time. Results do not depend on it."""
    return min(PLANS, key=lambda plan: estimate(plan, m, n, k))


def estimate(plan: Plan, m: int, n: int, k: int) -> float:
    """Return the estimated microseconds, if memory is not the limit. All clusters together fetch through the L2."""
    tiles, clusters = plan.tiles(m, n), SMS // plan.ctas
    busy_ctas = min(tiles, clusters) * plan.ctas
    fetched_bytes = plan.slot - 128 * plan.width * (plan.ctas - 1) // plan.ctas
    step = max(2 * ROWS * plan.width * UNIT / RATE, busy_ctas * fetched_bytes / L2_RATE)
    return -(-tiles // clusters) * (k // UNIT * step + FINISH)


@cache
def _kernel(variant: str) -> Kernel:
    """Return a kernel that is compiled on first use: a model needs few of the variants."""
    return Module(FILE, [variant]).kernel(variant, SHARED_LIMIT)
