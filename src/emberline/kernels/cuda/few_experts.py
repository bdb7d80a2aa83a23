"""multiply_gate_up, add_down: compute a layer's experts for at most 8 rows (tokens).

The first kernel selects the experts of each row by the router's logits, and multiplies by their gate and up matrices.
The second multiplies by their down matrices and adds the result to the rows. `few_experts.cu` has the kernels. Weights
are bfloat16, or packed (12 bits each, uw12).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, KernelArgument, count_sms, make_tensor_map
from emberline.kernels.cuda.expert_matrices import ExpertMatrices
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, SLOT_K
from emberline.kernels.cuda.routing import EXPERTS_PER_LANE, choose_experts_per_lane
from emberline.kernels.cuda.uw12 import BLOCK_ROWS
from emberline.kernels.mixture import Routing

FILE = "few_experts.cu"
MAX_ROWS = 8
MAX_HEADER_STRIDE = 1024  # bytes of a header of packed weights for which shared memory has room
ROW_BYTES = 2 * SLOT_K  # of 64 columns of x


@dataclass(frozen=True, slots=True)
class GateUpPlan:
    blocks: int  # blocks of 16 rows of a matrix in an item: 2 or 4
    stages: int  # of each warp's pipeline
    ctas_per_sm: int = 2
    warps: int = 4  # of a CTA, which split k

    def slot_bytes(self, weight: ExpertMatrices) -> int:
        return _round_up(ROW_BYTES * MAX_ROWS + self.blocks * weight.block_bytes)

    def shared_bytes(self, weight: ExpertMatrices) -> int:
        """Return the bytes of dynamic shared memory: the layout in few_experts.cu with padding for alignment."""
        sums = 2 * 4 * MAX_ROWS * (BLOCK_ROWS * self.blocks + 4)
        headers = 2 * (self.blocks * weight.header_stride + 8)
        return 1024 + headers + self.warps * (self.stages * (self.slot_bytes(weight) + 8) + sums)


@dataclass(frozen=True, slots=True)
class DownPlan:
    warps: int
    stages: int

    def slot_bytes(self, weight: ExpertMatrices) -> int:
        return _round_up(ROW_BYTES * MAX_ROWS + weight.block_bytes + weight.header_stride)


def multiply_gate_up(
    x: Tensor, logits: Tensor, rules: Routing, weight: ExpertMatrices, plan: GateUpPlan, *, pdl: bool = True
) -> Tensor:
    """Return silu(gate) * up of all experts that any row selects, [8 * selected experts, n / 2].

    Row 8 i + r of the result belongs to the i-th selected expert and row r of x."""
    rows, experts = logits.shape
    assert x.is_contiguous() and x.shape == (rows, weight.k) and rows <= MAX_ROWS and weight.gated
    used = min(experts, rows * rules.experts_per_row)
    inner = x.new_empty(MAX_ROWS * used, weight.n // 2)
    sizes = f"{plan.blocks}, {plan.warps}, {choose_experts_per_lane(experts)}"
    _get_kernel(f"multiply_gate_up<{weight.source_name}, {sizes}>")(
        (plan.ctas_per_sm * count_sms(), 1, 1),
        32 * plan.warps,
        (
            *(weight.make_argument(plan.blocks), make_tensor_map(x, (1, SLOT_K)), inner),
            *list_selection_rules(logits, rules),
            *(weight.n, weight.k, plan.stages),
        ),
        pdl=pdl,
        shared_bytes=plan.shared_bytes(weight),
    )
    return inner


def add_down(
    state: Tensor,
    inner: Tensor,
    logits: Tensor,
    rules: Routing,
    weight: ExpertMatrices,
    plan: DownPlan,
    *,
    pdl: bool = True,
) -> Tensor:
    """Add the weighted outputs of the experts to `state` in place.

    `inner`: the result of `multiply_gate_up`.

    With `pdl`, at least one other kernel must run between the kernel that wrote the logits and this one.
    """
    rows, experts = logits.shape
    assert state.is_contiguous() and state.shape == (rows, weight.n) and 8 * rows <= 32 * plan.warps
    slot = plan.slot_bytes(weight)
    sizes = f"{plan.warps}, {choose_experts_per_lane(experts)}"
    _get_kernel(f"add_down<{weight.source_name}, {sizes}>")(
        (weight.n // BLOCK_ROWS, 1, 1),
        32 * plan.warps,
        (
            *(weight.make_argument(1), make_tensor_map(inner, (1, SLOT_K)), state),
            *list_selection_rules(logits, rules),
            *(weight.n, weight.k, slot, plan.stages),
        ),
        pdl=pdl,
        shared_bytes=1024 + plan.warps * plan.stages * (slot + 8),
    )
    return state


def _round_up(size: int) -> int:
    return -(-size // 1024) * 1024  # the kernels' rows of x must be aligned


def list_selection_rules(logits: Tensor, rules: Routing) -> tuple[KernelArgument, ...]:
    rows, experts = logits.shape
    is_sigmoid = rules.scores == "sigmoid"
    return (
        *(logits, rules.correction, rows, experts, rules.experts_per_row),
        *(is_sigmoid, rules.renormalize, float(rules.scale)),
    )


def _list_kernel_names() -> list[str]:
    names = []
    for source, blocks, count in product(("PackedUnits", "PlainPairs"), (2, 4), EXPERTS_PER_LANE):
        names.append(f"multiply_gate_up<{source}, {blocks}, 4, {count}>")
    for source, count in product(("PackedUnits", "PlainRows"), EXPERTS_PER_LANE):
        names.append(f"add_down<{source}, 12, {count}>")
    return names


VARIANTS = tuple(_list_kernel_names())


def count_static_bytes(kernel_name: str) -> int:
    """Return an upper bound of the shared memory that a kernel has beside the dynamic one, in bytes."""
    numbers = [int(number) for number in kernel_name.rstrip(">").split(", ")[1:]]
    tables = 128 + 32 * numbers[-1] * (8 + 4 * MAX_ROWS)
    return tables + (4 * MAX_ROWS * (BLOCK_ROWS + 4) * numbers[0] if kernel_name.startswith("add_down") else 0)


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use, because a model needs only few."""
    limit = MAX_SHARED_BYTES - count_static_bytes(kernel_name)
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, limit)
