"""linear: y = x w^T for 33 to 256 rows of x, where reading the weights is still most of the time, or not much less than
the products; packed weights of many rows from 17 rows of x on. `wide.cu` says how.

A row's result does not depend on how many rows there are, nor on which of them it is: to the bit, for every m up to 32,
up to 64, up to 128, and beyond. Nor does it depend on whether the weights are packed, for the same split of k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import Argument, Kernel, Module, tensor_map
from emberline.kernels.cuda.linear import EPILOGUES, SHARED_LIMIT, SMS, UNIT, Weight, epilogue_of
from emberline.kernels.cuda.uw12 import UNIT_BYTES, Packed

FILE = "wide.cu"
LEAST_ROWS, MOST_ROWS = 33, 256
LEAST_LARGE = 225  # of plain weights: for fewer than this, and more than 128, cuBLAS is faster
GROUPS = (1, 2, 3, 4)  # warpgroups, 64 rows of w each
COLUMNS = (64, 128, 256)  # rows of x
LARGE = 256  # of them: tiles whose sums leave registers for two groups, and whose x CTAs may share
LARGE_GROUPS, SHARES = 2, (1, 2)
TRADES = 512  # groups * columns: a whole warpgroup fetches, and leaves its registers to the others
# Fewer, of packed weights: where their rows keep so many CTAs with tall tiles busy, which read x less often.
FEW, LEAST_OF_FEW, TALL, TALL_TILES = 32, 17, 4, 112
SPLITS = (1, 2, 3, 4)
SHARED_LIMITS = {1: SHARED_LIMIT, 2: 113 << 10}  # of a CTA, by how many share a multiprocessor
MOST_OF_TWO = 128  # groups * columns of packed weights, where registers are enough for two CTAs
CLUSTERS = {1: SMS, 2: 66, 3: 40, 4: 30, 6: 18, 8: 15}  # of a size an H200 runs so many at once; of 3 and 6 at least
# What bounds a plan, in bytes a microsecond: memory, what the L2 hands out, and what a multiprocessor takes in. Then
# what the parts of k cost in a cluster: to meet, in microseconds, and to hand sums over, in bytes a microsecond.
MEMORY_RATE, L2_RATE, SM_RATE = 4.39e6, 7.8e6, 0.1e6
MEETING, HANDING_RATE = 0.7, 0.06e6
# Of packed weights, in microseconds: a step of a CTA; what each group adds, and each column of a group.
STEP, GROUP_STEP, COLUMN_STEP = 0.15, 0.12, 0.0004
# Of large tiles, in microseconds: the products of a group's step, as gemm.cu has them; what a tile takes besides; and
# what the L2 hands out while they run. And cuBLAS for as many rows: FLOP a microsecond, what a call takes besides.
LARGE_MULTIPLYING, LARGE_FINISH, LARGE_L2_RATE = 0.36, 1.5, 6.0e6
CUBLAS_RATE, CUBLAS_CALL = 7.0e8, 6.0
# What CTAs that are no cluster leave for each other: room for the sums of a device's tiles, a word for each of their
# fragments, and looks at one, some 0.4 us each, before a CTA goes.
MOST_SUMS, MOST_FRAGMENTS, LOOKS = SMS * 256 * 128, SMS * 32, 256


class Row(NamedTuple):
    """What a plan is made of: warpgroups; parts of k; CTAs on a multiprocessor; of large tiles, how many share x; and
    whether the parts are no cluster."""

    groups: int
    split: int = 1
    beside: int = 1
    share: int = 1
    apart: bool = False  # packed weights only


# columns, n, k: where a sweep on an H200 knew better than the estimate. None: cuBLAS is faster. Large tiles of plain
# weights that are not named here should beat it.
MEASURED: dict[tuple[int, int, int], Row | None] = {
    (128, 6144, 4096): Row(1),
    (64, 4096, 4096): Row(1, 2),
    (128, 4096, 4096): Row(1, 2),
    (64, 28672, 4096): Row(2),
    (128, 28672, 4096): Row(2),
    (64, 4096, 14336): Row(1, 2),
    (128, 4096, 14336): Row(1, 2),
    (64, 128256, 4096): Row(2),
    (128, 128256, 4096): Row(2),
    (256, 6144, 4096): None,
    (256, 4096, 4096): None,
    (256, 28672, 4096): Row(2, share=2),
    (256, 4096, 14336): None,
    (256, 128256, 4096): None,
}
MEASURED_PACKED: dict[tuple[int, int, int], Row] = {
    (64, 6144, 4096): Row(2, 4, beside=2),
    (128, 6144, 4096): Row(1, 2, beside=2),
    (64, 4096, 4096): Row(1, 4, beside=2, apart=True),
    (128, 4096, 4096): Row(1, 4, beside=2, apart=True),
    (64, 28672, 4096): Row(2, beside=2),
    (128, 28672, 4096): Row(4),
    (64, 4096, 14336): Row(3, 6, apart=True),
    (128, 4096, 14336): Row(3, 6, apart=True),
    (64, 128256, 4096): Row(4),
    (128, 128256, 4096): Row(4),
    (256, 6144, 4096): Row(2, 2),
    (256, 4096, 4096): Row(2, 4, apart=True),
    (256, 28672, 4096): Row(2, share=2),
    (256, 4096, 14336): Row(2, 4, apart=True),
    (256, 128256, 4096): Row(2),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape is computed: a tile of w and x, the slots of a ring, and the CTAs that share a tile's k. `share`:
    CTAs that share tiles of x. `apart`: those that share k are no cluster."""

    groups: int
    columns: int
    stages: int
    split: int
    grid: int
    packed: bool = False
    share: int = 1
    apart: bool = False

    @property
    def cluster(self) -> int:
        return self.share if self.apart else self.split * self.share

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.groups * self.columns == TRADES else 32)

    @property
    def variant(self) -> str:
        tile = f"{self.groups}, {self.columns}"
        return f"wide_packed<{tile}>" if self.packed else f"wide<{tile}>"

    @property
    def slot(self) -> int:
        return 128 * self.columns + self.groups * (4 * UNIT_BYTES if self.packed else 128 * 64)

    @property
    def fetched(self) -> int:
        """Bytes of a slot that its own CTA asks for, at most."""
        return self.slot - 128 * self.columns * (self.share - 1) // self.share

    @property
    def shared(self) -> int:
        """The ring, its barriers, and what it takes to align them."""
        return 1024 + self.stages * (self.slot + 16)

    @property
    def fits_the_table(self) -> bool:
        """Sums of parts that are apart: of two at least, and as many as a word can count."""
        return 1 < self.split < 256 and self.share == 1 and self.grid * 64 * self.groups * self.columns <= MOST_SUMS

    @property
    def least_stages(self) -> int:
        """Partial sums take the ring's place, but not that of its barriers: a warp's last arrival may come after the
        CTAs have met."""
        fragments = -(-4 * self.groups // self.split) * self.split
        return -(-64 * self.columns * fragments // self.slot) if self.split > 1 and not self.apart else 1


PLAIN = (*product(GROUPS, COLUMNS[:2]), (LARGE_GROUPS, LARGE))
PACKED = (*PLAIN, (TALL, FEW))
VARIANTS = tuple(Plan(*tile, 1, 1, 1, tiles is PACKED).variant for tiles in (PLAIN, PACKED) for tile in tiles)


def supports(m: int, n: int, k: int, *, packed: bool = False) -> bool:
    """Whether it can be done, and should: for few rows `cuda.linear` may be faster, for more than 128 and plain weights
    cuBLAS. That would have packed ones unpacked first, which takes as long again."""
    if m < LEAST_ROWS:
        return fits(m, n, k) and packed and m >= LEAST_OF_FEW and n >= 64 * TALL * TALL_TILES
    return fits(m, n, k) and (m <= COLUMNS[-2] or packed or (m >= LEAST_LARGE and beats_cublas(n, k)))


def fits(m: int, n: int, k: int) -> bool:
    return 1 <= m <= MOST_ROWS and n > 0 and n % 64 == 0 and k > 0 and k % UNIT == 0


@cache
def beats_cublas(n: int, k: int) -> bool:
    """With large tiles of plain weights."""
    if (LARGE, n, k) in MEASURED:
        return bool(MEASURED[LARGE, n, k])
    return estimate(choose(LARGE, n, k), n, k) < 2 * LARGE * n * k / CUBLAS_RATE + CUBLAS_CALL


def linear(
    x: Tensor,
    w: Weight | Packed,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: Plan | None = None,
    looks: int = LOOKS,
) -> Tensor:
    """As `cuda.linear.linear`. `plan` and `looks` override the choice, for measurements and tests. Launches on one
    stream must follow each other: they share what parts leave there."""
    m, k = x.shape
    assert fits(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.data_ptr() % 16 == 0
    assert residual is None or residual.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = EPILOGUES.index(epilogue_of(out, residual, gated))
    packed = isinstance(w, Packed)
    plan = plan or choose(columns_of(m, packed=packed), w.n, k, packed=packed, gated=gated)
    assert plan.columns >= m and plan.split <= k // UNIT and plan.packed is packed
    assert plan.stages > 1 or k <= UNIT * plan.split, "a slot is given back when the next one's products are issued"
    assert plan.stages >= plan.least_stages
    teams = -(-w.n // (64 * plan.groups * plan.share))
    assert plan.split == 1 or plan.grid == plan.split * plan.share * teams, "one tile, or one of each that shares x"
    assert plan.grid % plan.cluster == 0 and (plan.share == 1 or plan.columns == LARGE)
    assert not plan.apart or (packed and plan.fits_the_table and not gated), "gates and ups must trade"
    _kernel(plan.variant)(
        (plan.grid, 1, 1),
        plan.threads,
        (
            *_weights(w, plan, gated),
            tensor_map(x, (-(-m // (8 * plan.share)) * 8, UNIT)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.split, plan.share, epilogue, int(pdl)),
            *_apart(plan, x.device, looks),
        ),
        pdl=pdl,
        cluster=plan.cluster,
        shared=plan.shared,
    )
    return out


def columns_of(m: int, *, packed: bool = False) -> int:
    return next(columns for columns in ((FEW, *COLUMNS) if packed else COLUMNS) if columns >= m)


@cache
def choose(columns: int, n: int, k: int, *, packed: bool = False, gated: bool = False) -> Plan:
    """The plan that should take the least time. It must not depend on more: the split is part of what a result is."""
    row = MEASURED_PACKED.get((columns, n, k)) if packed else MEASURED.get((columns, n, k))
    if row is not None and not (row.apart and gated):
        return planned(columns, n, k, row, packed=packed)
    known = [groups for groups, wide in (PACKED if packed else PLAIN) if wide == columns]
    tiles = product(known, SPLITS, SHARES if columns == LARGE else (1,))
    rows = (Row(groups, split, share=share) for groups, split, share in tiles)
    plans = [planned(columns, n, k, row, packed=packed) for row in rows]
    fitting = [plan for plan in plans if plan.split == 1 or plan.grid <= plan.cluster * CLUSTERS[plan.cluster]]
    return min((plan for plan in fitting if plan.split <= k // UNIT), key=lambda plan: estimate(plan, n, k))


def planned(columns: int, n: int, k: int, row: Row, *, packed: bool = False, ctas: int | None = None) -> Plan:
    """With as deep a ring as memory holds. CTAs that go from tile to tile get about as many each; where k is split, a
    CTA has one. `ctas`: so many at most go from tile to tile."""
    groups, split, beside, share, apart = row
    ctas, shared = beside * SMS if ctas is None else ctas, SHARED_LIMITS[beside]
    teams = -(-n // (64 * groups * share))  # of tiles that share x
    waves = -(-teams // (ctas // share)) if split == 1 else 1
    bare = Plan(groups, columns, 1, split, split * share * -(-teams // waves), packed, share, apart)
    most = waves * -(-k // (UNIT * split))  # steps of a CTA: more stages are never used
    return replace(bare, stages=max(bare.least_stages, min(most, (shared - 1024) // (bare.slot + 16))))


def estimate(plan: Plan, n: int, k: int) -> float:
    """Microseconds. What does not bound still gets in the way: a tenth of it is counted."""
    tiles, units = -(-n // (64 * plan.groups)), k // UNIT
    waves = -(-tiles * plan.split // plan.grid)
    steps = waves * -(-units // plan.split)  # of a CTA
    limits = [
        (1.5 if plan.packed else 2) * n * k / MEMORY_RATE,
        tiles * units * plan.fetched / (LARGE_L2_RATE if plan.columns == LARGE else L2_RATE),
        steps * plan.slot / SM_RATE,
    ]
    handed = 4 * 64 * plan.groups * plan.columns * (plan.split - 1) / plan.split
    parted = MEETING + handed / HANDING_RATE if plan.split > 1 else 0.0
    if plan.columns == LARGE:
        return max(*limits, steps * plan.groups * LARGE_MULTIPLYING) + waves * LARGE_FINISH + parted
    if plan.packed:
        limits.append(steps * (STEP + plan.groups * (GROUP_STEP + plan.columns * COLUMN_STEP)))
    return max(limits) + sum(limits) / 10 + parted


def _weights(w: Weight | Packed, plan: Plan, gated: bool) -> tuple[Argument, ...]:
    """As the kernel of the plan takes them."""
    if isinstance(w, Packed):
        return w.planes, w.headers, w.stride
    return (w.map(4 * plan.groups, paired=gated),)


def _apart(plan: Plan, device: torch.device, looks: int) -> tuple[Argument, ...]:
    if not plan.packed:
        return ()
    table = _table(device, torch.cuda.current_stream().cuda_stream) if plan.apart else (None, None)
    return *table, looks


@cache
def _table(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Where parts that are apart leave their sums, and the words for it, which are zero between launches."""
    assert not torch.cuda.is_current_stream_capturing(), "it would be zeroed with every replay, and not before"
    return torch.empty(MOST_SUMS, device=device), torch.zeros(MOST_FRAGMENTS, dtype=torch.int32, device=device)


@cache
def _kernel(variant: str) -> Kernel:
    """Compiled one by one, when first used: a model needs few of them."""
    return Module(FILE, [variant]).kernel(variant, SHARED_LIMIT)
