"""linear: y = x w^T for prompts, more rows of x than `wide` takes, with what follows built in. `gemm.cu` says how.

A row's result does not depend on how many rows there are, nor on which of them it is, nor on the plan: to the bit.
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
ROWS, THREADS, PANEL = 128, 384, 64  # as in the source: rows of a CTA's tile, threads, rows and columns of a panel
WIDTHS = {256: 4, 128: 6}  # rows of w in a tile, and slots of the ring
CTAS = (2, 1)  # that share their rows of w
BAND, LAG = 8, 1
# What bounds a plan: FLOP a microsecond of a multiprocessor, bytes a microsecond that the L2 hands out, and what it
# takes to begin and finish a tile, in microseconds.
RATE, L2_RATE, FINISH = 5.6e6, 7.0e6, 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape is computed: a CTA's rows of w, CTAs in a cluster, and what decides only when what is done: rows of
    tiles in a band, and by how many steps one warpgroup is behind the other."""

    width: int
    ctas: int
    band: int = BAND
    lag: int = LAG

    def variant(self, epilogue: str) -> str:
        return f"gemm<{self.width}, {self.ctas}, {epilogue}>"

    @property
    def slot(self) -> int:
        return 128 * (ROWS + self.width)

    @property
    def shared(self) -> int:
        """The ring, panels of outputs, barriers; and what it takes to align them."""
        stages = WIDTHS[self.width]
        return 1024 + stages * (self.slot + 16) + 4 * 2 * PANEL * PANEL

    def tiles(self, m: int, n: int) -> int:
        """Of a cluster."""
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
    """Into `out`, bf16. `residual` is added and may be `out` itself. Gated: silu(gate) * up, [m, n / 2]. `plan`
    overrides the choice, for measurements."""
    m, k = x.shape
    assert supports(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.dtype is torch.bfloat16
    assert all(t.data_ptr() % 16 == 0 for t in (x, out, residual) if t is not None)
    epilogue = epilogue_of(out, residual, gated)
    plan = plan or choose(m, w.n, k)
    assert plan.band > 0 and plan.lag < WIDTHS[plan.width], "who is ahead must find slots"
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
    """The plan that should take the least time; whichever it is, results are the same."""
    return min(PLANS, key=lambda plan: estimate(plan, m, n, k))


def estimate(plan: Plan, m: int, n: int, k: int) -> float:
    """Microseconds, if memory is no bound. All that clusters fetch together comes from the L2."""
    tiles, clusters = plan.tiles(m, n), SMS // plan.ctas
    busy = min(tiles, clusters) * plan.ctas
    fetched = plan.slot - 128 * plan.width * (plan.ctas - 1) // plan.ctas
    step = max(2 * ROWS * plan.width * UNIT / RATE, busy * fetched / L2_RATE)
    return -(-tiles // clusters) * (k // UNIT * step + FINISH)


@cache
def _kernel(variant: str) -> Kernel:
    """Compiled one by one, when first used: a model needs few of them."""
    return Module(FILE, [variant]).kernel(variant, SHARED_LIMIT)
