"""linear, multiply_gate_up, multiply_down: products with 4-bit codes, for at most some dozens of rows of a matrix.

`narrow.cu` has the kernel. A row's result does not depend, bit for bit, on its index or on other rows, but on the plan.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.attention_plan import GATE_GROUP_ROWS
from emberline.kernels.cuda.driver import CudaKernel, CudaModule
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, NUM_SMS
from emberline.kernels.cuda.narrow_layout import BLOCK_ROWS, NarrowWeight
from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.triton.routing import SortedRows

FILE = "narrow.cu"
MAX_ROWS = 128  # of a dense product: with more, unpacking the matrix for cuBLAS is faster
MAX_TILE_ROWS = 32
WARPS = 4
ACTIVATIONS = ("silu", "gelu", "clamped")  # as in narrow.cu
X_PITCH = 272  # bytes of a row of x in a slot
RESERVED_SHARED_BYTES = 1024  # of each CTA
UNPACKED_UNITS = 8  # of a CTA that unpacks
FORMATS = (
    *(f"Int4<{groups}, {zeros}>" for groups in (1, 2, 4) for zeros in ("false", "true")),
    "Float4<4>",
    "Float4<8>",
)
TILE_SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4))  # blocks, tiles


@dataclass(frozen=True, slots=True)
class NarrowPlan:
    """The tile sizes and the launch parameters with which a product of one shape is computed."""

    blocks: int  # blocks of 16 rows of w of a warp
    tiles: int  # tiles of 8 rows of x
    parts: int  # warps that share k
    stages: int  # of each warp's pipeline
    has_buffers: bool  # whether partial sums have memory besides the pipeline
    ctas_per_sm: int

    def kernel_name(self, format_name: str) -> str:
        return f"narrow<{format_name}, {self.blocks}, {self.tiles}, {WARPS}>"

    @property
    def cta_rows(self) -> int:
        return BLOCK_ROWS * self.blocks * WARPS // self.parts

    def shared_bytes(self, x_rows: int, unit_bytes: int) -> int:
        """Bytes of shared memory: the layout in narrow.cu."""
        slot = self.blocks * unit_bytes + x_rows * X_PITCH + 8
        return WARPS * (self.stages * slot + self.has_buffers * x_rows * (BLOCK_ROWS * self.blocks + 4) * 4)


VARIANTS = (  # all formats and all tile sizes, but not all pairs of them: those would take long to compile
    *(NarrowPlan(4, 1, 1, 1, True, 1).kernel_name(name) for name in FORMATS),
    *(
        NarrowPlan(*size, 1, 1, True, 1).kernel_name(name)
        for name, size in product(("Int4<1, false>", "Float4<4>"), TILE_SIZES)
        if size != (4, 1)
    ),
    *(f"unpack<{name}>" for name in FORMATS),
)


class NarrowProblem(ctypes.Structure):
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
    w: NarrowWeight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    pdl: bool = True,
    plan: NarrowPlan | None = None,
) -> Tensor:
    """Write x w^T into `out`, which is bf16 or float32, and return it.

    `bias`: float32 [n]. `residual` is added to the product and may be `out` itself. With `gated`, the matrix has the
    rows of gate before those of up, and the result is silu(gate) * up, or with `gelu` gelu(gate) * up. `plan` overrides
    the chosen plan, for benchmarks.
    """
    if w.columns is not None:
        x = x.index_select(1, w.columns)
    m = len(x)
    plan = plan or choose_plan(min(m, MAX_TILE_ROWS), 1, w.n, w.units, w.unit_bytes, gated=gated)
    tile_rows = 8 * plan.tiles
    problem = describe_dense(x, w, out, bias, residual, gated=gated, gelu=gelu)
    problem.tile_rows, problem.x_rows = tile_rows, min(m, tile_rows)
    _launch(problem, w, plan, -(-m // tile_rows), pdl=pdl)
    return out


def multiply_gate_up(
    x: Tensor,
    w: NarrowWeight,
    rows: SortedRows,
    *,
    bias: Tensor | None = None,
    clamp: ClampedSwiGLU | None = None,
    scaled: bool = False,
    pdl: bool = True,
    plan: NarrowPlan | None = None,
) -> Tensor:
    """Return the activations [assignments, width] of the rows' experts, as `triton.grouped.multiply_gate_up` does."""
    assert len(x) == len(rows.weights) // rows.experts_per_row
    out = x.new_empty(len(rows.weights), w.n // 2)
    plan = plan or choose_plan(rows.tile_rows, rows.max_tiles, w.n, w.units, w.unit_bytes, gated=True)
    problem = describe_problem(x, w, out, bias)
    problem.gated, problem.divisor, problem.triggers_late = True, rows.experts_per_row, True
    if clamp is not None:
        problem.activation, problem.alpha, problem.limit = ACTIVATIONS.index("clamped"), clamp.alpha, clamp.limit
    _launch_sorted(problem, w, plan, rows, scaled=scaled, pdl=pdl)
    return out


def multiply_down(
    inner: Tensor,
    w: NarrowWeight,
    rows: SortedRows,
    *,
    bias: Tensor | None = None,
    scaled: bool = True,
    pdl: bool = True,
    plan: NarrowPlan | None = None,
) -> Tensor:
    """Return the outputs [assignments, n] of the rows' experts, as `triton.grouped.multiply_down` does.

    The preceding kernel must be that of `multiply_gate_up`: it ends after the rows were sorted.
    """
    assert len(inner) == len(rows.weights)
    out = inner.new_empty(len(inner), w.n)
    plan = plan or choose_plan(rows.tile_rows, rows.max_tiles, w.n, w.units, w.unit_bytes)
    problem = describe_problem(inner, w, out, bias)
    problem.early = True
    _launch_sorted(problem, w, plan, rows, scaled=scaled, pdl=pdl)
    return out


def unpack(w: NarrowWeight, out: Tensor, *, gated: bool = False, pdl: bool = False) -> Tensor:
    """Write a matrix as bf16 [n, k] into `out` and return it.

    With `gated`, groups of `GATE_GROUP_ROWS` rows of gate and of up alternate, if the number of gate rows is a multiple
    of the group.
    """
    assert out.shape == (w.n, w.k) and out.dtype is torch.bfloat16 and out.is_contiguous() and len(w.data) == 1
    width = w.n // 2
    group = (GATE_GROUP_ROWS if width % GATE_GROUP_ROWS == 0 else width) if gated else 0
    units = w.blocks * w.units
    _get_kernel(f"unpack<{w.format}>")(
        (-(-units // UNPACKED_UNITS), 1, 1),
        32 * UNPACKED_UNITS,
        (w.data, w.row_scales, w.columns, out, units, w.units, w.n, w.k, group, w.factor),
        pdl=pdl,
        shared_bytes=0,
    )
    return out


def choose_tile_rows(assignments: int, experts: int) -> int:
    """Return the rows of a tile for so many pairs of a row and one of its experts."""
    return next((rows for rows in (8, 16) if assignments <= rows * experts * 3 // 4), MAX_TILE_ROWS)


@cache
def choose_plan(x_rows: int, row_tiles: int, n: int, units: int, unit_bytes: int, *, gated: bool = False) -> NarrowPlan:
    """Return the plan with which the busiest SM has the fewest rows of w, and of several the one with the most blocks.

    `x_rows`: of a tile. `row_tiles`: how many there may be.
    """
    tiles = next(size for size in (1, 2, 4) if 8 * size >= x_rows)
    parts = 4 if units >= 8 else 2 if units >= 4 else 1

    def count_rows(plan: NarrowPlan) -> tuple[int, int]:
        items = row_tiles * -(-n // plan.cta_rows)
        return -(-items // NUM_SMS) * plan.cta_rows, -plan.blocks

    allowed = ((2,) if n // 2 % (2 * BLOCK_ROWS) else (2, 4)) if gated else (1, 2, 4)  # halves are gates and ups
    sizes = [size for size, size_tiles in TILE_SIZES if size_tiles == tiles and size in allowed]
    return min((make_plan(size, tiles, parts, x_rows, unit_bytes) for size in sizes), key=count_rows)


def make_plan(
    blocks: int, tiles: int, parts: int, x_rows: int, unit_bytes: int, ctas_per_sm: tuple[int, ...] = (4, 3, 2)
) -> NarrowPlan:
    """Return the plan with the most CTAs on an SM that leave memory for two stages, and the stages that fit."""
    for ctas, has_buffers in product(ctas_per_sm, (True, False)):
        plan = NarrowPlan(blocks, tiles, parts, 0, has_buffers, ctas)
        limit = (MAX_SHARED_BYTES + RESERVED_SHARED_BYTES) // ctas - RESERVED_SHARED_BYTES
        base = plan.shared_bytes(x_rows, unit_bytes)
        stages = (limit - base) // (replace(plan, stages=1).shared_bytes(x_rows, unit_bytes) - base)
        if stages >= 2 and not (tiles == 4 and ctas > 2):
            return replace(plan, stages=min(stages, 8))
    raise AssertionError(f"no plan fits {x_rows} rows with {blocks} blocks of {unit_bytes} bytes")


def describe_problem(x: Tensor, w: NarrowWeight, out: Tensor, bias: Tensor | None) -> NarrowProblem:
    """Return a problem without rows and plan. `bias`: float32 [n], or [experts, n]."""
    assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] == w.k and x.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous() and bias.shape[-1] == w.n)
    assert out.is_contiguous() and out.dtype in (torch.bfloat16, torch.float32)
    return NarrowProblem(
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
    x: Tensor, w: NarrowWeight, out: Tensor, bias: Tensor | None, residual: Tensor | None, *, gated: bool, gelu: bool
) -> NarrowProblem:
    """Return the problem of a dense product, without plan."""
    m, width = out.shape
    assert m == len(x) >= 1 and w.n == (2 * width if gated else width) and len(w.data) == 1
    assert residual is None or (residual.shape == out.shape and residual.is_contiguous() and out.dtype is x.dtype)
    problem = describe_problem(x, w, out, bias)
    problem.rows, problem.early = m, True
    problem.gated, problem.activation = gated, ACTIVATIONS.index("gelu" if gelu else "silu")
    problem.residual = None if residual is None else residual.data_ptr()
    return problem


def describe_sorted(problem: NarrowProblem, rows: SortedRows, *, scaled: bool) -> None:
    """Add sorted rows to the problem of experts. `scaled`: whether outputs, or inputs, are multiplied by weights."""
    problem.order, problem.tile_experts = rows.order.data_ptr(), rows.tile_experts.data_ptr()
    problem.tile_counts, problem.num_tiles = rows.tile_counts.data_ptr(), rows.num_tiles.data_ptr()
    problem.tile_rows = problem.x_rows = rows.tile_rows
    problem.weights = rows.weights.data_ptr() if scaled else None


def _launch_sorted(
    problem: NarrowProblem, w: NarrowWeight, plan: NarrowPlan, rows: SortedRows, *, scaled: bool, pdl: bool
) -> None:
    assert rows.tile_rows == 8 * plan.tiles
    describe_sorted(problem, rows, scaled=scaled)
    _launch(problem, w, plan, rows.max_tiles, pdl=pdl)


def _launch(problem: NarrowProblem, w: NarrowWeight, plan: NarrowPlan, row_tiles: int, *, pdl: bool) -> None:
    problem.stages, problem.parts, problem.buffers = plan.stages, plan.parts, plan.has_buffers
    items, ctas = row_tiles * -(-w.n // plan.cta_rows), plan.ctas_per_sm * NUM_SMS
    waves = -(-items // ctas)
    _get_kernel(plan.kernel_name(w.format))(
        (-(-items // waves), 1, 1),
        32 * WARPS,
        (problem,),
        pdl=pdl,
        shared_bytes=plan.shared_bytes(problem.x_rows, w.unit_bytes),
    )


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use, because a model needs only a few kernels."""
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)
