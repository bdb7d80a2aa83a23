"""linear, multiply_gate_up, multiply_down: products with 4-bit codes, for dozens of rows of x per matrix.

`narrow_wide.cu` has the kernel. A row's result depends on the plan, but not on its index or on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES
from emberline.kernels.cuda.narrow import (
    FORMATS,
    MIN_COST,
    RESERVED_SHARED_BYTES,
    WARP_COST,
    FourBitProblem,
    describe_dense,
    describe_gate_up,
    describe_problem,
    describe_sorted,
)
from emberline.kernels.cuda.narrow_layout import FourBitWeight
from emberline.kernels.cuda.wide import MAX_CLUSTERS
from emberline.kernels.four_bit_size import UNIT_COLUMNS
from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.triton.routing import SortedRows, select_tiles
from emberline.kernels.work_limits import MAX_COPIED_PLACES, split_evenly

FILE = "narrow_wide.cu"
MIN_ROWS, MAX_ROWS = 9, 256  # of a dense product
COLUMNS = (32, 64, 128)  # rows of x in a tile
GROUPS = {32: (1, 2), 64: (1, 2), 128: (1, 2)}  # warpgroups of a CTA, each with 64 rows of w
PARTS = (1, 2, 4, 8)  # CTAs that share the k of a tile
SLOT_UNITS = {32: 2, 64: 1, 128: 1}  # units of a row in a slot
TILE_K = 64  # columns of a tile of x
# Where a sweep on an H200 found better plans: (columns of a tile, n, units): (warpgroups, parts).
MEASURED = {
    (32, 6144, 32): (2, 4),
    (32, 4096, 32): (1, 2),
    (32, 28672, 32): (2, 1),
    (32, 4096, 112): (1, 2),
    (64, 4096, 32): (1, 2),
    (64, 4096, 112): (1, 8),
}
# Limits of a plan: bytes per microsecond from memory, from the L2, and into one SM; and the cost of each part of k.
MEMORY_BYTES_PER_US, L2_BYTES_PER_US, SM_BYTES_PER_US, SHARING_US = 4.39e6, 7.0e6, 0.07e6, 1.0
MAX_STAGES = 12


@dataclass(frozen=True, slots=True)
class WideFourBitPlan:
    """The tile sizes and the launch parameters with which a product of one shape is computed."""

    groups: int
    columns: int
    parts: int
    stages: int

    def kernel_name(self, format_name: str) -> str:
        return f"narrow_wide<{format_name}, {self.groups}, {self.columns}>"

    def slot_bytes(self, unit_bytes: int) -> int:
        return -(-SLOT_UNITS[self.columns] * (256 * self.columns + 4 * self.groups * unit_bytes) // 1024) * 1024

    def shared_bytes(self, unit_bytes: int) -> int:
        """Bytes of shared memory: the layout in narrow_wide.cu, with padding for alignment."""
        sums = self.columns * (64 * self.groups + 4) * 4
        return 1024 + max(self.stages * (self.slot_bytes(unit_bytes) + 16), sums)


KERNELS = tuple(  # all that may be launched
    WideFourBitPlan(groups, columns, 1, 1).kernel_name(name)
    for columns, counts in GROUPS.items()
    for groups in counts
    for name in FORMATS
)
VARIANTS = (  # all formats and all tile sizes, but not all pairs of them: those would take long to compile
    *(WideFourBitPlan(1, 32, 1, 1).kernel_name(name) for name in FORMATS),
    *(
        WideFourBitPlan(groups, columns, 1, 1).kernel_name(FORMATS[0])
        for columns, counts in GROUPS.items()
        for groups in counts
        if (groups, columns) != (1, 32)
    ),
)


def linear(
    x: Tensor,
    w: FourBitWeight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    pdl: bool = True,
    plan: WideFourBitPlan | None = None,
) -> Tensor:
    """Write x w^T into `out` and return it; the arguments are those of `cuda.narrow.linear`."""
    if w.columns is not None:
        x = x.index_select(1, w.columns)
    m = len(x)
    plan = plan or choose_plan(m, 1, w.n, w.units, w.unit_bytes)
    problem = describe_dense(x, w, out, bias, residual, gated=gated, gelu=gelu)
    problem.tile_rows, problem.x_rows = plan.columns, min(-(-m // 8) * 8, plan.columns)
    _launch(problem, x, w, plan, -(-m // plan.columns), pdl=pdl)
    return out


def multiply_gate_up(
    x: Tensor,
    w: FourBitWeight,
    rows: SortedRows,
    *,
    bias: Tensor | None = None,
    clamp: ClampedSwiGLU | None = None,
    scaled: bool = False,
    pdl: bool = True,
    plan: WideFourBitPlan | None = None,
) -> Tensor:
    """Return the activations of the rows' experts in the order of the tiles of `rows`, [places in tiles, width].

    Inputs are copied into the order of the tiles, for some tiles at a time. The tiles of an expert are adjacent, so its
    weights are read twice only if its tiles are computed in two such parts.
    """
    assert len(x) == len(rows.weights) // rows.experts_per_row
    sources = rows.order.clamp(0, len(rows.weights) - 1) // rows.experts_per_row
    out = x.new_empty(len(rows.order), w.n // 2)
    for tiles in split_evenly(rows.max_tiles, MAX_COPIED_PLACES // rows.tile_rows):
        places = slice(tiles.start * rows.tile_rows, tiles.stop * rows.tile_rows)
        # `sort_rows` needs places, which the experts of other ranks do not have
        inputs = x.index_select(0, sources[places])
        problem = describe_gate_up(inputs, w, out[places], bias, clamp)
        problem.keeps_order = True
        _launch_sorted(problem, inputs, w, select_tiles(rows, tiles), plan, scaled=scaled, pdl=pdl)
        del inputs  # before those of the next part are allocated
    return out


def multiply_down(
    inner: Tensor,
    w: FourBitWeight,
    rows: SortedRows,
    *,
    bias: Tensor | None = None,
    scaled: bool = True,
    pdl: bool = True,
    plan: WideFourBitPlan | None = None,
) -> Tensor:
    """Return the outputs [rows * experts per row, n] of the rows' experts. `inner`: the result of `multiply_gate_up`.

    The preceding kernel must be that of `multiply_gate_up`, which lets this one start only after the rows are sorted.
    """
    assert len(inner) == len(rows.order)
    out = inner.new_empty(len(rows.weights), w.n)
    problem = describe_problem(inner, w, out, bias)
    problem.early = True
    _launch_sorted(problem, inner, w, rows, plan, scaled=scaled, pdl=pdl)
    return out


def choose_tile_rows(assignments: int, experts: int) -> int:
    """Return the rows of a tile. `assignments`: the number of pairs of a row and one of its experts."""
    return next((rows for rows in COLUMNS if assignments <= rows * experts * 3 // 4), COLUMNS[-1])


@cache
def choose_plan(m: int, experts: int, n: int, units: int, unit_bytes: int) -> WideFourBitPlan:
    """Return the plan with the least estimated time for `experts` matrices and m rows of x for each of them."""
    columns = next((size for size in COLUMNS if size >= m), COLUMNS[-1])
    tiles = -(-m // columns) * experts
    if tiles == 1 and (found := MEASURED.get((columns, n, units))):
        return make_plan(found[0], columns, found[1], unit_bytes)
    plans = [
        make_plan(groups, columns, parts, unit_bytes)
        for groups, parts in product(GROUPS[columns], PARTS)
        if parts <= units
    ]
    return min(plans, key=lambda plan: estimate_us(plan, tiles, n, units, unit_bytes))


def make_plan(groups: int, columns: int, parts: int, unit_bytes: int) -> WideFourBitPlan:
    """Return the plan with as many stages as fit."""
    ctas = count_ctas(groups, columns)
    limit = (MAX_SHARED_BYTES + RESERVED_SHARED_BYTES) // ctas - RESERVED_SHARED_BYTES
    plan = WideFourBitPlan(groups, columns, parts, 1)
    stages = min(MAX_STAGES, (limit - 1024) // (plan.slot_bytes(unit_bytes) + 16))
    return WideFourBitPlan(groups, columns, parts, stages)


def count_ctas(groups: int, columns: int) -> int:
    """Return how many CTAs shall run on an SM, as in narrow_wide.cu."""
    if columns > 64:
        return 1
    return 2 if groups == 2 else 3 if columns == 64 else 4


def estimate_us(plan: WideFourBitPlan, row_tiles: int, n: int, units: int, unit_bytes: int) -> float:
    """Return the estimated time of a product, limited by memory, the L2, or the busiest SM."""
    ctas = row_tiles * -(-n // (64 * plan.groups)) * plan.parts
    own_units = -(-units // plan.parts)
    cta_bytes = own_units * (4 * plan.groups * unit_bytes + 2 * UNIT_COLUMNS * plan.columns)
    total = n // 16 * units * unit_bytes
    limits = (
        total / MEMORY_BYTES_PER_US,
        ctas * cta_bytes / L2_BYTES_PER_US,
        -(-ctas // count_sms()) * cta_bytes / SM_BYTES_PER_US,
    )
    busiest = min(-(-ctas // count_sms()), count_ctas(plan.groups, plan.columns))
    clusters, max_clusters = ctas // plan.parts, MAX_CLUSTERS[plan.parts] * busiest  # `_launch` allows no more CTAs
    waves = 1 if plan.parts == 1 else -(-clusters // max_clusters)
    latency = MIN_COST + WARP_COST / (4 * plan.groups * busiest)
    return max(limits) * latency * waves + SHARING_US * plan.parts * (plan.parts > 1)


def _launch_sorted(
    problem: FourBitProblem,
    x: Tensor,
    w: FourBitWeight,
    rows: SortedRows,
    plan: WideFourBitPlan | None,
    *,
    scaled: bool,
    pdl: bool,
) -> None:
    plan = plan or choose_plan(rows.tile_rows, len(w.data), w.n, w.units, w.unit_bytes)
    assert rows.tile_rows == plan.columns
    describe_sorted(problem, rows, scaled=scaled)
    _launch(problem, x, w, plan, rows.max_tiles, pdl=pdl)


def _launch(
    problem: FourBitProblem, x: Tensor, w: FourBitWeight, plan: WideFourBitPlan, row_tiles: int, *, pdl: bool
) -> None:
    assert supports_shape(w), "tiles of x have 64 columns"
    tiles = x.view(len(x), -1, TILE_K).transpose(0, 1)
    assert plan.stages > 1 or not w.format.startswith("Float4"), "its slots are released a step later"
    problem.stages, problem.parts = plan.stages, plan.parts
    grid = row_tiles * -(-w.n // (64 * plan.groups)) * plan.parts
    boxes = (problem.x_rows, min(problem.x_rows, plan.columns // 2))  # of a tile of x, and of one with few rows
    # No more CTAs shall fit on an SM than are needed; otherwise they could start on few SMs while others are idle.
    ctas = min(-(-grid // count_sms()), count_ctas(plan.groups, plan.columns))
    minimum = (MAX_SHARED_BYTES + RESERVED_SHARED_BYTES) // (ctas + 1) + 16
    _get_kernel(plan.kernel_name(w.format))(
        (grid, 1, 1),
        128 * plan.groups + 32,
        (problem, *(make_tensor_map(tiles, (2 * SLOT_UNITS[plan.columns], rows, TILE_K)) for rows in boxes)),
        pdl=pdl,
        cluster=plan.parts,
        shared_bytes=max(minimum, plan.shared_bytes(w.unit_bytes)),
    )


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use, because a model needs only a few kernels."""
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)


def supports(m: int, w: FourBitWeight) -> bool:
    """Return whether `linear` supports m rows of x and is faster than `cuda.narrow.linear`."""
    return MIN_ROWS <= m <= MAX_ROWS and supports_shape(w)


def supports_shape(w: FourBitWeight) -> bool:
    """Return whether the kernels of this module can read the matrix."""
    return w.k % TILE_K == 0
