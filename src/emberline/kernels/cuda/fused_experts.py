"""run_selected: one kernel that selects the experts of few rows and computes both of their products; uw12 weights.

`fused_experts.cu` has the kernel.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda import wide
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.expert_matrices import ExpertMatrices
from emberline.kernels.cuda.few_experts import list_selection_rules
from emberline.kernels.cuda.grouped import TILES_OF_32
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, SLOT_K
from emberline.kernels.cuda.routing import EXPERTS_PER_LANE, choose_experts_per_lane
from emberline.kernels.mixture import Routing
from emberline.kernels.triton.routing import max_tile_count

FILE = "fused_experts.cu"
PLAN = TILES_OF_32
MAX_ROWS, MAX_ASSIGNMENTS = 64, 512


def supports(rows: int, rules: Routing, gate_up: ExpertMatrices, down: ExpertMatrices) -> bool:
    is_small = rows <= MAX_ROWS and rows * rules.experts_per_row <= MAX_ASSIGNMENTS and not rules.scales_inputs
    is_packed = gate_up.is_packed and down.is_packed
    return is_small and is_packed and PLAN.supports(gate_up) and PLAN.supports(down)


def run_selected(
    x: Tensor, logits: Tensor, rules: Routing, gate_up: ExpertMatrices, down: ExpertMatrices, *, pdl: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of the rows' experts, and a place and a routing weight for each assignment.

    An assignment is a pair of a row and one of its experts. The outputs are [places, hidden]: an assignment's place is
    the index of its row there. `logits`: the router's logits, float32 [rows, experts].
    """
    rows, experts = logits.shape
    assignments, per_lane = rows * rules.experts_per_row, choose_experts_per_lane(experts)
    tiles = max_tile_count(assignments, experts, PLAN.tile_rows)
    words = wide.get_exchange_memory(x.device)[1]
    assert (
        supports(rows, rules, gate_up, down) and gate_up.gated and gate_up.n == 2 * down.k and 2 * tiles <= len(words)
    )
    assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape == (rows, gate_up.k) and gate_up.k == down.n
    kernel = _get_kernel(per_lane)
    # While the kernel is only compiled and not launched, other kernels still read the places.
    places = (torch.empty if kernel.is_loaded else torch.zeros)(assignments, dtype=torch.int32, device=x.device)
    weights = torch.empty(assignments, dtype=torch.float32, device=x.device)
    inner, out = x.new_empty(tiles * PLAN.tile_rows, down.k), x.new_empty(tiles * PLAN.tile_rows, down.n)
    slot, headers = PLAN.slot_bytes(gate_up) + 16, max(PLAN.other_bytes(gate_up), PLAN.other_bytes(down))
    available = MAX_SHARED_BYTES // PLAN.ctas_per_sm - 1024 - count_table_bytes(per_lane)
    stages = (available - headers) // slot
    kernel(
        (PLAN.ctas_per_sm * count_sms(x.device), 1, 1),  # all must run at the same time
        128 * PLAN.groups + 32,
        (
            *(gate_up.make_argument(4 * PLAN.groups), down.make_argument(4 * PLAN.groups)),
            *(make_tensor_map(x, (1, SLOT_K)), make_tensor_map(inner, (1, SLOT_K)), inner, out, words),
            *(down.n, down.k, stages, places, weights, *list_selection_rules(logits, rules)),
        ),
        pdl=pdl,
        shared_bytes=headers + stages * slot,
    )
    return out, places, weights


def count_table_bytes(per_lane: int) -> int:
    """Return an upper bound of the bytes of the struct `SharedTiles` in fused_experts.cu.

    `per_lane`: experts for each lane of a warp."""
    experts = 32 * per_lane
    tiles = experts + MAX_ASSIGNMENTS // PLAN.tile_rows
    return 16 + (8 + 2) * experts + (2 + 1 + PLAN.tile_rows) * tiles + 2 * MAX_ASSIGNMENTS


VARIANTS = tuple(f"select_and_run<PackedUnits, PackedUnits, {count}>" for count in EXPERTS_PER_LANE)


@cache
def _get_kernel(per_lane: int) -> CudaKernel:
    name = f"select_and_run<PackedUnits, PackedUnits, {per_lane}>"
    return CudaModule(FILE, [name]).kernel(name, MAX_SHARED_BYTES // PLAN.ctas_per_sm)
