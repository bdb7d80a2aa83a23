"""linear, multiply_gate_up, multiply_down: products with weights of 4-bit codes, for few rows of x per matrix.

`narrow.cu` has the kernel. A row's result does not depend, bit for bit, on its index or on other rows. It depends
on the number of warps among which the plan divides k.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES
from emberline.kernels.cuda.narrow_layout import FourBitWeight
from emberline.kernels.four_bit_size import BLOCK_ROWS
from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.triton.routing import SortedRows
from emberline.kernels.work_limits import GATE_GROUP_ROWS

FILE = "narrow.cu"
MAX_ROWS = 128  # of a dense product: with more, unpacking the matrix for cuBLAS is faster
MAX_TILE_ROWS = 32
FEW_WARPS, MANY_WARPS = 4, 16  # of a CTA: many for small products, where one CTA on each SM computes all
ACTIVATIONS = ("silu", "gelu", "clamped")  # as in narrow.cu
X_PITCH = 272  # bytes of a row of x in a slot
RESERVED_SHARED_BYTES = 1024  # of each CTA
UNPACKED_UNITS = 8  # of a CTA that unpacks
FORMATS = (
    *(f"Int4<{groups}, {zeros}>" for groups in (1, 2, 4) for zeros in ("false", "true")),
    "Float4<4>",
    "Float4<8>",
)
TILE_SIZES = (  # blocks, tiles, warps
    *((blocks, 1, FEW_WARPS) for blocks in (1, 2, 4)),
    *((blocks, tiles, FEW_WARPS) for tiles in (2, 4) for blocks in (2, 4)),
    *((blocks, 1, MANY_WARPS) for blocks in (1, 2)),
)
MAX_WARPS_PER_SM, MAX_STAGES = 16, 8
# Cost of a plan: by the blocks that a bulk copy fetches, since an SM starts one in about 60 ns, and by the warps of an
# SM, because few hide little latency.
COPY_COSTS = {1: 1.9, 2: 1.2, 4: 1.0}
MIN_COST, WARP_COST = 0.5, 8.0  # 1.0 with 16 warps


@dataclass(frozen=True, slots=True)
class FourBitPlan:
    """The tile sizes and the launch parameters with which a product of one shape is computed."""

    blocks: int  # blocks of 16 rows of w of a warp
    tiles: int  # tiles of 8 rows of x
    warps: int
    parts: int  # warps that share k
    stages: int  # of each warp's pipeline
    buffers: int  # sets of partial sums besides the pipeline's own memory
    ctas_per_sm: int

    def kernel_name(self, format_name: str) -> str:
        return f"narrow<{format_name}, {self.blocks}, {self.tiles}, {self.warps}>"

    @property
    def cta_rows(self) -> int:
        return BLOCK_ROWS * self.blocks * self.warps // self.parts

    def shared_bytes(self, x_rows: int, unit_bytes: int) -> int:
        """Bytes of shared memory: the layout in narrow.cu.

        A small layout is enlarged so that no more than `ctas_per_sm` CTAs fit on an SM. Otherwise several CTAs of the
        next kernel could start on one SM while other SMs are idle.
        """
        minimum = (MAX_SHARED_BYTES + RESERVED_SHARED_BYTES) // (self.ctas_per_sm + 1) + 16
        return max(minimum, self.layout_bytes(x_rows, unit_bytes))

    def layout_bytes(self, x_rows: int, unit_bytes: int) -> int:
        slot = self.blocks * unit_bytes + x_rows * X_PITCH + 8
        return self.warps * (self.stages * slot + self.buffers * x_rows * (BLOCK_ROWS * self.blocks + 4) * 4)


def _name_kernel(size: tuple[int, int, int], format_name: str) -> str:
    return FourBitPlan(*size, 1, 1, 1, 1).kernel_name(format_name)


KERNELS = (  # all that may be launched
    *(_name_kernel(size, name) for size in TILE_SIZES for name in FORMATS),
    *(f"unpack<{name}>" for name in FORMATS),
)
VARIANTS = (  # all formats and all tile sizes, but not all pairs of them: those would take long to compile
    *(_name_kernel((4, 1, FEW_WARPS), name) for name in FORMATS),
    *(_name_kernel(size, FORMATS[0]) for size in TILE_SIZES if size != (4, 1, FEW_WARPS)),
    *(f"unpack<{name}>" for name in FORMATS),
)


class FourBitProblem(ctypes.Structure):
    """The kernels' parameter, `Problem` in narrow.cuh."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("expert_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("row_scales", "x", "out", "residual", "bias", "weights")),
        *((name, ctypes.c_void_p) for name in ("order", "tile_experts", "tile_counts", "num_tiles")),
        *((name, ctypes.c_int) for name in ("blocks", "width", "k", "rows", "tile_rows", "divisor")),
        *((name, ctypes.c_int) for name in ("stages", "parts", "buffers", "x_rows")),
        *((name, ctypes.c_int) for name in ("gated", "activation", "float32", "early", "triggers_late", "keeps_order")),
        *((name, ctypes.c_float) for name in ("factor", "alpha", "limit")),
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
    fixed_order: bool = False,
    pdl: bool = True,
    plan: FourBitPlan | None = None,
) -> Tensor:
    """Write x w^T into `out`, which is bf16 or float32, and return it.

    `bias`: float32 [n]. `residual` is added to the product and may be `out` itself. With `gated`, the matrix has
    rows of gate and of up, and the result is silu(gate) * up, or gelu(gate) * up with `gelu`. `fixed_order`:
    whether sums have the same order for any number of rows. `plan` overrides the chosen plan, for benchmarks.
    """
    if w.columns is not None:
        x = x.index_select(1, w.columns)
    m = len(x)
    plan = plan or choose_plan(min(m, MAX_TILE_ROWS), 1, w.n, w.units, w.unit_bytes, fixed_order=fixed_order)
    tile_rows = 8 * plan.tiles
    problem = describe_dense(x, w, out, bias, residual, gated=gated, gelu=gelu)
    problem.tile_rows, problem.x_rows = tile_rows, min(m, tile_rows)
    items = -(-m // tile_rows) * _count_items(w, plan)
    _launch(problem, w, plan, -(-items // -(-items // _count_ctas(plan))), pdl=pdl)
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
    plan: FourBitPlan | None = None,
) -> Tensor:
    """Return the activations of the rows' experts, as `triton.grouped.multiply_gate_up` does."""
    assert len(x) == len(rows.weights) // rows.experts_per_row
    out = x.new_empty(len(rows.weights), w.n // 2)
    plan = plan or choose_plan(rows.tile_rows, rows.max_tiles, w.n, w.units, w.unit_bytes)
    problem = describe_gate_up(x, w, out, bias, clamp)
    problem.divisor = rows.experts_per_row
    _launch_sorted(problem, w, plan, rows, scaled=scaled, pdl=pdl)
    return out


def multiply_down(
    inner: Tensor,
    w: FourBitWeight,
    rows: SortedRows,
    *,
    bias: Tensor | None = None,
    scaled: bool = True,
    pdl: bool = True,
    plan: FourBitPlan | None = None,
) -> Tensor:
    """Return the outputs of the rows' experts, as `triton.grouped.multiply_down` does.

    The preceding kernel must be that of `multiply_gate_up`, which lets this one start only after the rows are sorted.
    """
    assert len(inner) == len(rows.weights)
    out = inner.new_empty(len(inner), w.n)
    plan = plan or choose_plan(rows.tile_rows, rows.max_tiles, w.n, w.units, w.unit_bytes)
    problem = describe_problem(inner, w, out, bias)
    problem.early = True
    _launch_sorted(problem, w, plan, rows, scaled=scaled, pdl=pdl)
    return out


def unpack(w: FourBitWeight, out: Tensor, *, pdl: bool = False) -> Tensor:
    """Write a matrix as bf16 [n, k] into `out` and return it.

    The rows of a gated matrix are written in alternating groups of `GATE_GROUP_ROWS` rows of gate and of up or, if the
    number of gate rows is not a multiple of that, all rows of gate first.
    """
    assert out.shape == (w.n, w.k) and out.dtype is torch.bfloat16 and out.is_contiguous() and len(w.data) == 1
    width = w.n // 2
    group = (GATE_GROUP_ROWS if width % GATE_GROUP_ROWS == 0 else width) if w.gated else 0
    units = w.blocks * w.units
    _get_kernel(f"unpack<{w.format}>", shared_bytes=0)(
        (-(-units // UNPACKED_UNITS), 1, 1),
        32 * UNPACKED_UNITS,
        (w.data, w.row_scales, w.columns, out, units, w.units, w.n, w.k, group, w.factor),
        pdl=pdl,
    )
    return out


def choose_tile_rows(assignments: int, experts: int) -> int:
    """Return the rows of a tile. `assignments`: the number of pairs of a row and one of its experts."""
    return next((rows for rows in (8, 16) if assignments <= rows * experts), MAX_TILE_ROWS)


@cache
def choose_plan(
    x_rows: int,
    row_tiles: int,
    n: int,
    units: int,
    unit_bytes: int,
    *,
    fixed_order: bool = False,
) -> FourBitPlan:
    """Return the plan with the least estimated cost.

    The cost is the number of rows of w that the busiest SM computes, times a factor that is larger if few warps run on
    the SM or tiles are small. `x_rows`: rows of x in a tile. `row_tiles`: an upper bound of the number of tiles of rows
    of x.
    """
    tiles = next(size for size in (1, 2, 4) if 8 * size >= x_rows)
    plans = []
    for blocks, size_tiles, warps in TILE_SIZES:
        if size_tiles != tiles or (fixed_order and warps != FEW_WARPS):
            continue
        most = 1 << (min(warps, max(units // 2, 1)).bit_length() - 1)
        for parts in (most, most // 2) if most == MANY_WARPS else (most,):
            items = row_tiles * -(-n // (BLOCK_ROWS * blocks * warps // parts))
            busiest = -(-items // count_sms())
            plan = make_plan(blocks, tiles, warps, parts, x_rows, unit_bytes, min(busiest, MAX_WARPS_PER_SM // warps))
            active = min(busiest, plan.ctas_per_sm) * warps
            cost = COPY_COSTS[blocks] * (MIN_COST + WARP_COST / active)
            plans.append((busiest * plan.cta_rows * cost, warps, items, plan))
    return min(plans, key=lambda found: found[:3])[3]


def make_plan(
    blocks: int, tiles: int, warps: int, parts: int, x_rows: int, unit_bytes: int, max_ctas: int
) -> FourBitPlan:
    """Return the plan with the most CTAs on an SM, up to `max_ctas`, that have memory for two stages.

    With MANY_WARPS warps, plans with three pipeline stages are preferred. Of plans with equally many CTAs, the one with
    the most sets of partial sums is returned.
    """
    many = warps == MANY_WARPS
    options = product((3, 2) if many else (2,), range(max_ctas, 0, -1), (2, 1, 0) if many else (1, 0))
    for min_stages, ctas, buffers in options:
        plan = FourBitPlan(blocks, tiles, warps, parts, 0, buffers, ctas)
        limit = (MAX_SHARED_BYTES + RESERVED_SHARED_BYTES) // ctas - RESERVED_SHARED_BYTES
        base = plan.layout_bytes(x_rows, unit_bytes)
        stages = (limit - base) // (replace(plan, stages=1).layout_bytes(x_rows, unit_bytes) - base)
        if stages >= min_stages and not (tiles == 4 and ctas > 2) and not (tiles == 2 and ctas > 3):
            return replace(plan, stages=min(stages, MAX_STAGES))
    raise AssertionError(f"no plan fits {x_rows} rows with {blocks} blocks of {unit_bytes} bytes")


def describe_problem(x: Tensor, w: FourBitWeight, out: Tensor, bias: Tensor | None) -> FourBitProblem:
    """Return the kernel's parameter for a product, without rows and plan. `bias`: float32 [n], or [experts, n]."""
    assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] == w.k and x.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous() and bias.shape[-1] == w.n)
    assert out.is_contiguous() and out.dtype in (torch.bfloat16, torch.float32)
    return FourBitProblem(
        codes=w.data.data_ptr(),
        expert_bytes=w.data.stride(0),
        row_scales=None if w.row_scales is None else w.row_scales.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        blocks=w.blocks,
        width=out.shape[1],
        k=w.k,
        divisor=1,
        float32=out.dtype is torch.float32,
        factor=w.factor,
    )


def describe_dense(
    x: Tensor, w: FourBitWeight, out: Tensor, bias: Tensor | None, residual: Tensor | None, *, gated: bool, gelu: bool
) -> FourBitProblem:
    """Return the kernel's parameter for a dense product, in which the plan is not set yet."""
    m, width = out.shape
    assert m == len(x) >= 1 and w.n == (2 * width if gated else width) and len(w.data) == 1
    assert residual is None or (residual.shape == out.shape and residual.is_contiguous() and out.dtype is x.dtype)
    assert w.gated == gated, "gates and ups must be packed as such"
    problem = describe_problem(x, w, out, bias)
    problem.rows, problem.early = m, True
    problem.gated, problem.activation = gated, ACTIVATIONS.index("gelu" if gelu else "silu")
    problem.residual = None if residual is None else residual.data_ptr()
    return problem


def describe_gate_up(
    x: Tensor, w: FourBitWeight, out: Tensor, bias: Tensor | None, clamp: ClampedSwiGLU | None
) -> FourBitProblem:
    """Return the kernel's parameter for the gate and up products of experts.

    The rows and the plan are set later. The kernel that follows, for the down products, reads the tables of the sorted
    rows as soon as it starts. So `triggers_late` is set: the gate and up kernel lets it start only when the kernel that
    sorted the rows has ended.
    """
    assert w.gated, "gates and ups must be packed as such"
    problem = describe_problem(x, w, out, bias)
    problem.gated = problem.triggers_late = True
    if clamp is not None:
        problem.activation, problem.alpha, problem.limit = ACTIVATIONS.index("clamped"), clamp.alpha, clamp.limit
    return problem


def describe_sorted(problem: FourBitProblem, rows: SortedRows, *, scaled: bool) -> None:
    """Set the sorted rows in the kernel's parameter for a product of experts.

    `scaled`: whether outputs, or inputs if the problem is gated, are multiplied by the routing weights."""
    problem.order, problem.tile_experts = rows.order.data_ptr(), rows.tile_experts.data_ptr()
    problem.tile_counts, problem.num_tiles = rows.tile_counts.data_ptr(), rows.num_tiles.data_ptr()
    problem.tile_rows = problem.x_rows = rows.tile_rows
    problem.weights = rows.weights.data_ptr() if scaled else None


def _launch_sorted(
    problem: FourBitProblem, w: FourBitWeight, plan: FourBitPlan, rows: SortedRows, *, scaled: bool, pdl: bool
) -> None:
    assert rows.tile_rows == 8 * plan.tiles
    describe_sorted(problem, rows, scaled=scaled)
    # As many CTAs as can run: with fewer, of equally many items each, some SMs would have a CTA more than others.
    _launch(problem, w, plan, min(rows.max_tiles * _count_items(w, plan), _count_ctas(plan)), pdl=pdl)


def _count_items(w: FourBitWeight, plan: FourBitPlan) -> int:
    """Return the number of work items of one tile of rows of x."""
    return -(-w.n // plan.cta_rows)


def _count_ctas(plan: FourBitPlan) -> int:
    return plan.ctas_per_sm * count_sms()


def _launch(problem: FourBitProblem, w: FourBitWeight, plan: FourBitPlan, ctas: int, *, pdl: bool) -> None:
    problem.stages, problem.parts, problem.buffers = plan.stages, plan.parts, plan.buffers
    _get_kernel(plan.kernel_name(w.format))(
        (ctas, 1, 1),
        32 * plan.warps,
        (problem,),
        pdl=pdl,
        shared_bytes=plan.shared_bytes(problem.x_rows, w.unit_bytes),
    )


@cache
def _get_kernel(kernel_name: str, shared_bytes: int = MAX_SHARED_BYTES) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use, because a model needs only a few kernels."""
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, shared_bytes)
