"""Grouped products: rows times the matrices of their experts, for few rows of each expert, bf16 or uw12 weights.

`grouped.cu` has the kernels. `multiply_gate_up` and `multiply_down` take rows that `triton/routing.py` sorted by
expert. For at most 8 rows, `select_and_multiply_gate_up` and `add_down` select the experts themselves, from the logits
of the router, and need no other kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda import uw12
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, KernelArgument, make_tensor_map
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, NUM_SMS, SLOT_K
from emberline.kernels.cuda.routing import EXPERTS_PER_LANE, choose_experts_per_lane
from emberline.kernels.cuda.uw12 import BLOCK_ROWS, UNIT_BYTES, PackedUnits, UW12Weight
from emberline.kernels.mixture import Routing
from emberline.kernels.triton.routing import SortedRows

FILE = "grouped.cu"
MAX_SELECTING_ROWS = 8  # of x, for which the kernels select the experts themselves
MAX_TILE_ROWS = 32
DOWN_WARPS = (4, 6, 8)  # of `add_down`, each with two units of 64 k at a time
MAX_COPIED_WEIGHTS = 32 << 20  # elements that are copied at a time, to alternate rows of gate and of up
PAIRED_ROWS = 8  # rows of gate, and as many rows of up, that a block of 16 rows of packed weights has


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """The tile sizes and the launch parameters of a grouped product."""

    blocks: int  # blocks of 16 rows of a matrix in an item; a quarter of 64 rows, a half or all of them
    warps: int  # of a CTA, which split k
    stages: int  # of each warp's pipeline
    ctas_per_sm: int = 1
    buffers: int = 2  # sets of partial sums


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices [count, n, k] of a layer's experts.

    `data`: bf16, with the rows of gate before those of up; or packed as one matrix of count * n rows, where `gated`
    ones have 8 rows of gate and 8 of up alternating.
    """

    data: Tensor | UW12Weight
    n: int
    k: int
    gated: bool = False

    @property
    def is_packed(self) -> bool:
        return isinstance(self.data, UW12Weight)

    @property
    def source_name(self) -> str:
        return "PackedUnits" if isinstance(self.data, UW12Weight) else "PlainPairs" if self.gated else "PlainRows"

    @property
    def header_stride(self) -> int:
        return self.data.header_stride if isinstance(self.data, UW12Weight) else 0

    def make_argument(self, blocks: int) -> KernelArgument:
        """Return the argument of kernels that fetch so many blocks of 16 rows at a time."""
        if isinstance(self.data, UW12Weight):
            return PackedUnits.from_weight(self.data)
        if not self.gated:
            return make_tensor_map(self.data.flatten(0, 1), (BLOCK_ROWS * blocks, SLOT_K))
        pairs = self.data.view(len(self.data), 2, -1, PAIRED_ROWS, self.k).transpose(1, 2)
        return make_tensor_map(pairs, (1, blocks, 2, PAIRED_ROWS, SLOT_K))


def interleave_gate_up(stack: Tensor) -> Tensor:
    """Return a copy of [experts, 2 * width, k] in which 8 rows of gate and the 8 matching rows of up alternate."""
    count, rows, columns = stack.shape
    return stack.view(count, 2, rows // (2 * PAIRED_ROWS), PAIRED_ROWS, columns).transpose(1, 2).reshape(stack.shape)


def pack_experts(stack: Tensor, *, gated: bool) -> UW12Weight | None:
    """Return [experts, n, k] as packed matrices, or None if they cannot be packed or packing does not save enough.

    `gated`: whether they are the rows of gate, then those of up. Of these, copies of a few experts exist at a time.
    """
    count, n, k = stack.shape
    if stack.dtype is not torch.bfloat16 or n % 64 or not uw12.supports(count * n, k) or (gated and n % 128):
        return None
    step = max(1, MAX_COPIED_WEIGHTS // (n * k))

    def make_pieces() -> Iterator[Tensor]:
        for part in stack.split(step) if gated else (stack,):
            yield (interleave_gate_up(part) if gated else part).flatten(0, 1)

    return uw12.pack_pieces(count * n, k, make_pieces, stack.device)


def count_shared_bytes(plan: GroupedPlan, tile_rows: int, header_stride: int) -> int:
    """Return the bytes of shared memory: the layout in grouped.cu with padding for alignment."""
    slot = 128 * tile_rows + plan.blocks * (UNIT_BYTES if header_stride else 2048)
    partial = 4 * tile_rows * (BLOCK_ROWS * plan.blocks + 4)
    headers = 2 * (plan.blocks * header_stride + 8) if header_stride else 0
    return 1024 + headers + plan.warps * (plan.stages * (-(-slot // 1024) * 1024 + 8) + plan.buffers * partial)


def multiply_gate_up(
    x: Tensor,
    weight: ExpertMatrices,
    rows: SortedRows,
    plan: GroupedPlan,
    *,
    scaled: bool = False,
    pdl: bool = True,
) -> Tensor:
    """Return silu(gate) * up for each place of the sorted rows, [max_tiles * tile_rows, n / 2].

    Places without a row are not written. `scaled`: whether inputs are multiplied by the weights of assignments.
    """
    tile_rows, width = rows.tile_rows, weight.n // 2
    assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] == weight.k and tile_rows <= MAX_TILE_ROWS
    inner = x.new_empty(rows.max_tiles * tile_rows, width)
    _get_kernel(f"multiply_gate_up<{weight.source_name}, {plan.blocks}, {tile_rows // 8}, {plan.warps}>")(
        (plan.ctas_per_sm * NUM_SMS, 1, 1),
        32 * plan.warps,
        (
            *(weight.make_argument(plan.blocks), make_tensor_map(x, (1, SLOT_K)), inner),
            *(rows.tile_experts, rows.tile_counts, rows.order, rows.num_tiles),
            *(rows.weights if scaled else None, rows.experts_per_row, weight.n, weight.k, plan.stages, plan.buffers),
        ),
        pdl=pdl,
        shared_bytes=count_shared_bytes(plan, tile_rows, weight.header_stride),
    )
    return inner


def multiply_down(
    inner: Tensor,
    weight: ExpertMatrices,
    rows: SortedRows,
    plan: GroupedPlan,
    *,
    scaled: bool = True,
    pdl: bool = True,
) -> Tensor:
    """Return the outputs of each assignment, [assignments, n]. `inner`: from `multiply_gate_up`.

    `scaled`: whether outputs are multiplied by the weights of assignments. With `pdl`, the kernel before the preceding
    one must have ended: `multiply_gate_up` waits for it.
    """
    tile_rows = rows.tile_rows
    out = inner.new_empty(len(rows.weights), weight.n)
    _get_kernel(f"multiply_down<{weight.source_name}, {plan.blocks}, {tile_rows // 8}, {plan.warps}>")(
        (plan.ctas_per_sm * NUM_SMS, 1, 1),
        32 * plan.warps,
        (
            *(weight.make_argument(plan.blocks), make_tensor_map(inner, (1, SLOT_K)), out),
            *(rows.tile_experts, rows.tile_counts, rows.order, rows.num_tiles, rows.weights if scaled else None),
            *(weight.n, weight.k, plan.stages, plan.buffers),
        ),
        pdl=pdl,
        shared_bytes=count_shared_bytes(plan, tile_rows, weight.header_stride),
    )
    return out


def select_and_multiply_gate_up(
    x: Tensor, logits: Tensor, routing: Routing, weight: ExpertMatrices, plan: GroupedPlan, *, pdl: bool = True
) -> Tensor:
    """Return silu(gate) * up of the experts in use, [8 * experts in use, n / 2]: of expert i, row r is 8 i + r."""
    rows, experts = logits.shape
    assert x.is_contiguous() and x.shape == (rows, weight.k) and rows <= MAX_SELECTING_ROWS
    used = min(experts, rows * routing.experts_per_row)
    inner = x.new_empty(MAX_SELECTING_ROWS * used, weight.n // 2)
    sizes = f"{plan.blocks}, {plan.warps}, {choose_experts_per_lane(experts)}"
    _get_kernel(f"select_and_multiply_gate_up<{weight.source_name}, {sizes}>")(
        (plan.ctas_per_sm * NUM_SMS, 1, 1),
        32 * plan.warps,
        (
            *(weight.make_argument(plan.blocks), make_tensor_map(x, (1, SLOT_K)), inner),
            *_make_rules(logits, routing),
            *(weight.n, weight.k, plan.stages, plan.buffers),
        ),
        pdl=pdl,
        shared_bytes=count_shared_bytes(plan, MAX_SELECTING_ROWS, weight.header_stride),
    )
    return inner


def add_down(
    state: Tensor,
    inner: Tensor,
    logits: Tensor,
    routing: Routing,
    weight: ExpertMatrices,
    plan: GroupedPlan,
    *,
    pdl: bool = True,
) -> Tensor:
    """Add the weighted outputs of the experts to `state` in place. `inner`: of `select_and_multiply_gate_up`.

    With `pdl`, the kernel that wrote the logits must be the one before the preceding one.
    """
    rows, experts = logits.shape
    assert state.is_contiguous() and state.shape == (rows, weight.n) and 8 * rows <= 32 * plan.warps
    weights_bytes = 2 * UNIT_BYTES + weight.header_stride if weight.header_stride else 2 * 2048
    slot = -(-(2 * 1024 + weights_bytes) // 1024) * 1024
    _get_kernel(f"add_down<{weight.source_name}, {plan.warps}, {choose_experts_per_lane(experts)}>")(
        (weight.n // BLOCK_ROWS, 1, 1),
        32 * plan.warps,
        (
            *(weight.make_argument(1), make_tensor_map(inner, (1, SLOT_K)), state),
            *_make_rules(logits, routing),
            *(weight.n, weight.k, slot, plan.stages),
        ),
        pdl=pdl,
        shared_bytes=1024 + plan.warps * plan.stages * (slot + 8),
    )
    return state


def _make_rules(logits: Tensor, routing: Routing) -> tuple[KernelArgument, ...]:
    rows, experts = logits.shape
    is_sigmoid = routing.scores == "sigmoid"
    return (
        *(logits, routing.correction, rows, experts, routing.experts_per_row),
        *(is_sigmoid, routing.renormalize, float(routing.scale)),
    )


def choose_down_warps(k: int) -> int:
    """Return the number of warps of `add_down` with which the busiest warp has the fewest columns (k)."""
    return min(DOWN_WARPS, key=lambda warps: (-(-k // (2 * SLOT_K * warps)) * warps, -warps))


def _list_kernel_names() -> list[str]:
    gate_up, down = ("PackedUnits", "PlainPairs"), ("PackedUnits", "PlainRows")
    sizes = list(product((2, 4), (1, 2, 4), (4, 8)))
    names = [f"multiply_gate_up<{source}, {b}, {t}, {w}>" for source, (b, t, w) in product(gate_up, sizes)]
    names += [f"multiply_down<{source}, {b}, {t}, {w}>" for source, (b, t, w) in product(down, sizes)]
    for source, (b, w), count in product(gate_up, ((2, 8), (4, 4)), EXPERTS_PER_LANE):
        names.append(f"select_and_multiply_gate_up<{source}, {b}, {w}, {count}>")
    for source, warps, count in product(down, DOWN_WARPS, EXPERTS_PER_LANE):
        names.append(f"add_down<{source}, {warps}, {count}>")
    return names


VARIANTS = tuple(_list_kernel_names())


def count_static_bytes(kernel_name: str) -> int:
    """Return an upper bound of the shared memory that a kernel has beside the dynamic one, in bytes."""
    function, _, arguments = kernel_name.rstrip(">").partition("<")
    numbers = [int(number) for number in arguments.split(", ")[1:]]
    if function in ("multiply_gate_up", "multiply_down"):
        return 16 * 8 * numbers[1]
    tables = 128 + 32 * numbers[-1] * (8 + 4 * MAX_SELECTING_ROWS)
    return tables + (numbers[0] * 640 if function == "add_down" else 0)


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    limit = MAX_SHARED_BYTES - count_static_bytes(kernel_name)
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, limit)
