"""linear: y = x w^T for 33 to 256 rows of x, and for packed weights with many rows from 17 rows of x on.

In this range reading the weights takes most of the time, or not much less than the arithmetic. `wide.cu` has the
kernel.

A row's result does not depend on its index, nor on the number of rows m within each of the ranges up to 32, up to 64,
up to 128, and above, bit for bit. For the same split of k it does not depend on whether the weights are packed.
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
LEAST_LARGE = 225  # rows of x; for 129 to 224 rows and plain weights cuBLAS is faster
GROUPS = (1, 2, 3, 4)  # warpgroups of a CTA, each with 64 rows of w
COLUMNS = (64, 128, 256)  # columns of a tile: rows of x
LARGE = 256  # columns of large tiles: registers suffice for two warpgroups, and CTAs of a cluster may share x
LARGE_GROUPS, SHARES = 2, (1, 2)
TRADES = 512  # groups * columns from which a whole warpgroup only fetches and gives its registers to the others
# Tiles for 17 to 32 rows of x and packed weights: tall tiles read x less often. Used if w has enough rows for so many.
FEW, LEAST_OF_FEW, TALL, TALL_TILES = 32, 17, 4, 112
SPLITS = (1, 2, 3, 4)
SHARED_LIMITS = {1: SHARED_LIMIT, 2: 113 << 10}  # shared memory of a CTA, by the number of CTAs on an SM
MOST_OF_TWO = 128  # groups * columns of packed weights up to which registers suffice for two CTAs on an SM
CLUSTERS = {1: SMS, 2: 66, 3: 40, 4: 30, 6: 18, 8: 15}  # clusters of a size that an H200 runs at once; 3, 6: at least
# Limits of a plan: bytes per microsecond from memory, from the L2, and into one SM. Then the cost of splitting k within
# a cluster: its synchronisation, and the bytes per microsecond at which CTAs exchange sums.
MEMORY_RATE, L2_RATE, SM_RATE = 4.39e6, 7.8e6, 0.1e6
MEETING, HANDING_RATE = 0.7, 0.06e6
# Packed weights: a step of a CTA, plus each warpgroup, plus each column of a warpgroup.
STEP, GROUP_STEP, COLUMN_STEP = 0.15, 0.12, 0.0004
# Large tiles: a step of a warpgroup, as in gemm.cu; the fixed time of a tile; the L2's rate meanwhile. And cuBLAS for
# as many rows: FLOP per microsecond and the fixed time of a call.
LARGE_MULTIPLYING, LARGE_FINISH, LARGE_L2_RATE = 0.36, 1.5, 6.0e6
CUBLAS_RATE, CUBLAS_CALL = 7.0e8, 6.0
# Unclustered CTAs exchange sums in global memory: floats for the sums of all tiles, a counter word for each fragment,
# and how often a CTA polls a counter (about 0.4 us each) before it leaves its sums to another CTA.
MOST_SUMS, MOST_FRAGMENTS, LOOKS = SMS * 256 * 128, SMS * 32, 256


class Row(NamedTuple):
    """The parameters from which a plan is made."""

    groups: int  # warpgroups of a CTA
    split: int = 1  # parts of k
    beside: int = 1  # CTAs on an SM
    share: int = 1  # CTAs that share x; large tiles only
    apart: bool = False  # whether the parts of k are separate CTAs, not a cluster; packed weights only


# (columns, n, k) for which a sweep on an H200 found a better plan than the estimate. None: cuBLAS is faster. For large
# tiles of plain weights that are not listed, `beats_cublas` estimates.
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
    """How one shape is computed."""

    groups: int  # warpgroups of a CTA, each with 64 rows of w
    columns: int  # rows of x in a tile
    stages: int  # stages of the shared-memory pipeline
    split: int  # CTAs that share a tile's k
    grid: int  # CTAs
    packed: bool = False
    share: int = 1  # CTAs that share a tile of x
    apart: bool = False  # whether the CTAs that share k are not a cluster

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
        """Bytes of a slot that its own CTA fetches, at most."""
        return self.slot - 128 * self.columns * (self.share - 1) // self.share

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the pipeline, its barriers, and padding for alignment."""
        return 1024 + self.stages * (self.slot + 16)

    @property
    def fits_the_table(self) -> bool:
        """Whether unclustered parts can exchange their sums: two or more parts, few enough for the counter words."""
        return 1 < self.split < 256 and self.share == 1 and self.grid * 64 * self.groups * self.columns <= MOST_SUMS

    @property
    def least_stages(self) -> int:
        """The stages whose memory the exchange of partial sums needs.

        Partial sums overwrite the pipeline's slots but not its barriers, since a warp's last arrival may come after the
        cluster has synchronised.
        """
        fragments = -(-4 * self.groups // self.split) * self.split
        return -(-64 * self.columns * fragments // self.slot) if self.split > 1 and not self.apart else 1


PLAIN = (*product(GROUPS, COLUMNS[:2]), (LARGE_GROUPS, LARGE))
PACKED = (*PLAIN, (TALL, FEW))
VARIANTS = tuple(Plan(*tile, 1, 1, 1, tiles is PACKED).variant for tiles in (PLAIN, PACKED) for tile in tiles)


def supports(m: int, n: int, k: int, *, packed: bool = False) -> bool:
    """Return whether `linear` computes this shape and should.

    For few rows `cuda.linear` may be faster, and for more than 128 rows and plain weights cuBLAS. For packed weights
    cuBLAS would need them unpacked first, which takes as long again.
    """
    if m < LEAST_ROWS:
        return fits(m, n, k) and packed and m >= LEAST_OF_FEW and n >= 64 * TALL * TALL_TILES
    return fits(m, n, k) and (m <= COLUMNS[-2] or packed or (m >= LEAST_LARGE and beats_cublas(n, k)))


def fits(m: int, n: int, k: int) -> bool:
    return 1 <= m <= MOST_ROWS and n > 0 and n % 64 == 0 and k > 0 and k % UNIT == 0


@cache
def beats_cublas(n: int, k: int) -> bool:
    """Return whether large tiles of plain weights are faster than cuBLAS."""
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
    """Compute as `cuda.linear.linear`. `plan` and `polls` override the defaults for benchmarks and tests.

    Launches on one stream must not overlap, since they share the memory for the exchange of sums.
    """
    m, k = x.shape
    assert fits(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.data_ptr() % 16 == 0
    assert residual is None or residual.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = EPILOGUES.index(epilogue_of(out, residual, gated))
    packed = isinstance(w, Packed)
    plan = plan or choose(columns_of(m, packed=packed), w.n, k, packed=packed, gated=gated)
    assert plan.columns >= m and plan.split <= k // UNIT and plan.packed is packed
    assert plan.stages > 1 or k <= UNIT * plan.split, "a slot is released when the next slot's products are issued"
    assert plan.stages >= plan.least_stages
    teams = -(-w.n // (64 * plan.groups * plan.share))
    assert plan.split == 1 or plan.grid == plan.split * plan.share * teams, "with a split, a CTA has one tile"
    assert plan.grid % plan.cluster == 0 and (plan.share == 1 or plan.columns == LARGE)
    # A gated epilogue needs a cluster, within which CTAs exchange gates and ups.
    assert not plan.apart or (packed and plan.fits_the_table and not gated)
    _kernel(plan.variant)(
        (plan.grid, 1, 1),
        plan.threads,
        (
            *_weight_arguments(w, plan, gated),
            tensor_map(x, (-(-m // (8 * plan.share)) * 8, UNIT)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.split, plan.share, epilogue, int(pdl)),
            *_exchange_arguments(plan, x.device, looks),
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
    """Return the plan with the least estimated time.

    It must depend on these arguments only, because the split of k determines the result's last bits.
    """
    row = MEASURED_PACKED.get((columns, n, k)) if packed else MEASURED.get((columns, n, k))
    if row is not None and not (row.apart and gated):
        return planned(columns, n, k, row, packed=packed)
    group_counts = [groups for groups, wide in (PACKED if packed else PLAIN) if wide == columns]
    tiles = product(group_counts, SPLITS, SHARES if columns == LARGE else (1,))
    rows = (Row(groups, split, share=share) for groups, split, share in tiles)
    plans = [planned(columns, n, k, row, packed=packed) for row in rows]
    fitting = [plan for plan in plans if plan.split == 1 or plan.grid <= plan.cluster * CLUSTERS[plan.cluster]]
    return min((plan for plan in fitting if plan.split <= k // UNIT), key=lambda plan: estimate(plan, n, k))


def planned(columns: int, n: int, k: int, row: Row, *, packed: bool = False, ctas: int | None = None) -> Plan:
    """Return the plan for a configuration, with as many pipeline stages as fit into shared memory.

    Without a split, at most `ctas` CTAs share the tiles evenly. With a split, each CTA has one tile.
    """
    groups, split, ctas_per_sm, share, unclustered = row
    ctas, shared = ctas_per_sm * SMS if ctas is None else ctas, SHARED_LIMITS[ctas_per_sm]
    teams = -(-n // (64 * groups * share))  # groups of tiles that share x
    waves = -(-teams // (ctas // share)) if split == 1 else 1
    base = Plan(groups, columns, 1, split, split * share * -(-teams // waves), packed, share, unclustered)
    max_stages = waves * -(-k // (UNIT * split))  # steps of a CTA: more stages are never used
    return replace(base, stages=max(base.least_stages, min(max_stages, (shared - 1024) // (base.slot + 16))))


def estimate(plan: Plan, n: int, k: int) -> float:
    """Return the estimated microseconds: the tightest limit, plus a tenth of all limits, since they interfere."""
    tiles, units = -(-n // (64 * plan.groups)), k // UNIT
    waves = -(-tiles * plan.split // plan.grid)
    steps = waves * -(-units // plan.split)  # of a CTA
    limits = [
        (1.5 if plan.packed else 2) * n * k / MEMORY_RATE,
        tiles * units * plan.fetched / (LARGE_L2_RATE if plan.columns == LARGE else L2_RATE),
        steps * plan.slot / SM_RATE,
    ]
    exchanged = 4 * 64 * plan.groups * plan.columns * (plan.split - 1) / plan.split
    split_cost = MEETING + exchanged / HANDING_RATE if plan.split > 1 else 0.0
    if plan.columns == LARGE:
        return max(*limits, steps * plan.groups * LARGE_MULTIPLYING) + waves * LARGE_FINISH + split_cost
    if plan.packed:
        limits.append(steps * (STEP + plan.groups * (GROUP_STEP + plan.columns * COLUMN_STEP)))
    return max(limits) + sum(limits) / 10 + split_cost


def _weight_arguments(w: Weight | Packed, plan: Plan, gated: bool) -> tuple[Argument, ...]:
    """Return the weight as arguments of the plan's kernel."""
    if isinstance(w, Packed):
        return w.planes, w.headers, w.stride
    return (w.map(4 * plan.groups, paired=gated),)


def _exchange_arguments(plan: Plan, device: torch.device, looks: int) -> tuple[Argument, ...]:
    if not plan.packed:
        return ()
    memory = _exchange_memory(device, torch.cuda.current_stream().cuda_stream) if plan.apart else (None, None)
    return *memory, looks


@cache
def _exchange_memory(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Return the memory where unclustered parts leave their sums, and its counters, which are zero between launches."""
    assert not torch.cuda.is_current_stream_capturing(), "a captured graph would zero the counters in every replay"
    return torch.empty(MOST_SUMS, device=device), torch.zeros(MOST_FRAGMENTS, dtype=torch.int32, device=device)


@cache
def _kernel(variant: str) -> Kernel:
    """Return a kernel that is compiled on first use: a model needs few of the variants."""
    return Module(FILE, [variant]).kernel(variant, SHARED_LIMIT)
