"""linear: y = x w^T for 33 to 128 rows of x, where reading the weights is still most of the time. `wide.cu` says how.

A row's result does not depend on how many rows there are, nor on which of them it is: to the bit, for every m up to 64,
and for every m beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import Kernel, Module, tensor_map
from emberline.kernels.cuda.linear import EPILOGUES, SHARED_LIMIT, SMS, UNIT, Weight, epilogue_of

FILE = "wide.cu"
LEAST_ROWS, MOST_ROWS = 33, 128
GROUPS = (1, 2, 3, 4)  # warpgroups, 64 rows of w each
COLUMNS = (64, 128)  # rows of x
CLUSTERS = {1: SMS, 2: 66, 3: 40, 4: 30}  # how many clusters of a size an H200 runs at once; of 3: at least
# What bounds a plan, in bytes a microsecond: memory, what the L2 hands out, and what a multiprocessor takes in. Then
# what the parts of k cost in a cluster: to meet, in microseconds, and to hand sums over, in bytes a microsecond.
MEMORY_RATE, L2_RATE, SM_RATE = 4.39e6, 7.8e6, 0.1e6
MEETING, HANDING_RATE = 0.7, 0.06e6
MEASURED = {  # columns, n, k: groups and split, where a sweep on an H200 knew better than the estimate
    (128, 6144, 4096): (1, 1),
    (64, 4096, 4096): (1, 2),
    (128, 4096, 4096): (1, 2),
    (64, 28672, 4096): (2, 1),
    (128, 28672, 4096): (2, 1),
    (64, 4096, 14336): (1, 2),
    (128, 4096, 14336): (1, 2),
    (64, 128256, 4096): (2, 1),
    (128, 128256, 4096): (2, 1),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape is computed: a tile of w and x, the slots of a ring, and the CTAs that share a tile's k."""

    groups: int
    columns: int
    stages: int
    split: int
    grid: int

    @property
    def variant(self) -> str:
        return f"wide<{self.groups}, {self.columns}>"

    @property
    def slot(self) -> int:
        return 128 * (64 * self.groups + self.columns)

    @property
    def shared(self) -> int:
        """The ring and its barriers, or the partial sums that take their place; and what it takes to align them."""
        fragments = -(-4 * self.groups // self.split) * self.split
        partial = 64 * self.columns * fragments if self.split > 1 else 0
        return 1024 + max(self.stages * (self.slot + 16), partial)


VARIANTS = tuple(Plan(groups, columns, 1, 1, 1).variant for groups, columns in product(GROUPS, COLUMNS))


def supports(m: int, n: int, k: int) -> bool:
    return LEAST_ROWS <= m <= MOST_ROWS and n > 0 and n % 64 == 0 and k > 0 and k % UNIT == 0


def linear(
    x: Tensor,
    w: Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: Plan | None = None,
) -> Tensor:
    """As `cuda.linear.linear`."""
    m, k = x.shape
    assert supports(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.data_ptr() % 16 == 0
    assert residual is None or residual.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = EPILOGUES.index(epilogue_of(out, residual, gated))
    plan = plan or choose(COLUMNS[m > COLUMNS[0]], w.n, k)
    assert plan.columns >= m and plan.split <= k // UNIT
    assert plan.stages > 1 or k <= UNIT * plan.split, "a slot is given back when the next one's products are issued"
    assert plan.split == 1 or plan.grid == plan.split * -(-w.n // (64 * plan.groups)), "a cluster has one tile"
    _kernel(plan.variant)(
        (plan.grid, 1, 1),
        32 * (4 * plan.groups + 1),
        (
            w.map(4 * plan.groups, paired=gated),
            tensor_map(x, (plan.columns, UNIT)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.split, epilogue, int(pdl)),
        ),
        pdl=pdl,
        cluster=plan.split,
        shared=plan.shared,
    )
    return out


@cache
def choose(columns: int, n: int, k: int) -> Plan:
    """The plan that should take the least time. It must not depend on more: the split is part of what a result is."""
    if (columns, n, k) in MEASURED:
        groups, split = MEASURED[columns, n, k]
        return planned(groups, columns, n, k, split)
    plans = [planned(groups, columns, n, k, split) for groups, split in product(GROUPS, CLUSTERS)]
    fitting = [plan for plan in plans if plan.split == 1 or plan.grid <= plan.split * CLUSTERS[plan.split]]
    return min((plan for plan in fitting if plan.split <= k // UNIT), key=lambda plan: estimate(plan, n, k))


def planned(groups: int, columns: int, n: int, k: int, split: int = 1, *, ctas: int = SMS) -> Plan:
    """With as deep a ring as memory holds. CTAs that go from tile to tile get about as many each; a cluster has one."""
    tiles = -(-n // (64 * groups))
    waves = -(-tiles // ctas) if split == 1 else 1
    bare = Plan(groups, columns, 1, split, split * -(-tiles // waves))
    most = waves * -(-k // (UNIT * split))  # steps of a CTA: more stages are never used
    return Plan(groups, columns, min(most, (SHARED_LIMIT - 1024) // (bare.slot + 16)), split, bare.grid)


def estimate(plan: Plan, n: int, k: int) -> float:
    """Microseconds. What does not bound still gets in the way: a tenth of it is counted."""
    tiles, units = -(-n // (64 * plan.groups)), k // UNIT
    waves = -(-tiles * plan.split // plan.grid)
    limits = (
        2 * n * k / MEMORY_RATE,
        tiles * units * plan.slot / L2_RATE,
        waves * -(-units // plan.split) * plan.slot / SM_RATE,
    )
    handed = 4 * 64 * plan.groups * plan.columns * (plan.split - 1) / plan.split
    return max(limits) + sum(limits) / 10 + (MEETING + handed / HANDING_RATE if plan.split > 1 else 0.0)


@cache
def _kernel(variant: str) -> Kernel:
    """Compiled one by one, when first used: a model needs few of them."""
    return Module(FILE, [variant]).kernel(variant, SHARED_LIMIT)
