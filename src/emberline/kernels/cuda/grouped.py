"""multiply_tiles: multiplies rows that are sorted by expert, each by the bf16 or uw12 matrix of its expert.

`grouped.cu` has the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.expert_matrices import ExpertMatrices
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, SLOT_K
from emberline.kernels.triton.routing import SortedRows
from emberline.kernels.work_limits import GATHERED_TILE_ROWS, MAX_TILE_ROWS

FILE = "grouped.cu"
BOX_ROWS = GATHERED_TILE_ROWS  # rows of x that a copy fetches, if they are sorted
# Units (64 columns) of each CTA's first rows of a matrix that are read while rows of x are still being sorted, if
# experts have enough rows on average.
PREFETCHED_UNITS, MIN_PREFETCHED_ROWS = 8, 2
PRODUCER_THREADS = {32: 32, 64: 32, 128: 32, 256: 128}  # by the rows of a tile


@dataclass(frozen=True, slots=True)
class ExpertTilePlan:
    groups: int  # warpgroups of a CTA, each with 64 rows of a matrix
    tile_rows: int
    ctas_per_sm: int = 1
    share: int = 1  # CTAs of a cluster, which share a tile

    @property
    def gathers(self) -> bool:
        """Whether the kernel fetches the rows of x one by one, which is too slow for larger tiles."""
        return self.tile_rows == BOX_ROWS

    def slot_bytes(self, weight: ExpertMatrices) -> int:
        return 128 * self.tile_rows + 4 * self.groups * weight.block_bytes

    def other_bytes(self, weight: ExpertMatrices) -> int:
        """Return the bytes of shared memory besides the pipeline: alignment, headers and their barriers."""
        return 1024 + 2 * 4 * self.groups * weight.header_stride + 32

    def count_stages(self, weight: ExpertMatrices) -> int:
        available = MAX_SHARED_BYTES // self.ctas_per_sm - (1024 if self.ctas_per_sm > 1 else 0)
        return (available - self.other_bytes(weight)) // (self.slot_bytes(weight) + 16)

    def supports(self, weight: ExpertMatrices) -> bool:
        rows = 64 * self.groups * self.share
        return weight.n % rows == 0 and weight.k % SLOT_K == 0 and self.count_stages(weight) >= 2


# For up to about 12, 40 and 96 rows of an expert, and for more.
TILES_OF_32, TILES_OF_64 = ExpertTilePlan(2, 32, 2), ExpertTilePlan(2, 64, 2)
TILES_OF_128, TILES_OF_256 = ExpertTilePlan(2, 128), ExpertTilePlan(2, MAX_TILE_ROWS, share=2)
PLANS_BY_ROWS = {plan.tile_rows: plan for plan in (TILES_OF_32, TILES_OF_64, TILES_OF_128, TILES_OF_256)}


def multiply_tiles(
    x: Tensor,
    weight: ExpertMatrices,
    rows: SortedRows,
    plan: ExpertTilePlan,
    *,
    scaled: bool = False,
    pdl: bool = True,
) -> Tensor:
    """Multiply each row by the matrix of its expert, and return the results in the order of the tiles.

    A place is a position of a row in the tiles of `rows`. `x` has a row for each place or, if the matrices are gated
    and the plan `gathers` rows, the rows before sorting. The results of gated matrices are silu(gate) * up. Places
    without a row are not written. `scaled`: whether the inputs of gated matrices are multiplied by the routing weights.
    With `pdl`, and matrices that are not gated, at least one other kernel must run between the kernel that wrote the
    tables of `rows` and this one.
    """
    assert plan.supports(weight) and rows.tile_rows == plan.tile_rows
    assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] == weight.k
    places, gathers = rows.max_tiles * plan.tile_rows, weight.gated and plan.gathers
    assert len(x) == (len(rows.weights) // rows.experts_per_row if gathers else places)
    out = x.new_empty(places, weight.n // 2 if weight.gated else weight.n)
    stages = plan.count_stages(weight)
    prefetched = PREFETCHED_UNITS if len(rows.weights) >= MIN_PREFETCHED_ROWS * weight.count else 0
    sizes = f"{str(weight.gated).lower()}, {plan.groups}, {plan.tile_rows}"
    _get_kernel(f"multiply_tiles<{weight.source_name}, {sizes}>")(
        (plan.ctas_per_sm * count_sms(), 1, 1),
        128 * plan.groups + PRODUCER_THREADS[plan.tile_rows],
        (
            weight.make_argument(4 * plan.groups),
            make_tensor_map(x, (1 if gathers else BOX_ROWS, SLOT_K)),
            *(out, rows.tile_experts, rows.tile_counts, rows.order, rows.num_tiles),
            rows.weights if scaled else None,
            *(rows.experts_per_row if gathers else 0, weight.n, weight.k, stages, plan.share, weight.count, prefetched),
        ),
        pdl=pdl,
        cluster=plan.share,
        shared_bytes=plan.other_bytes(weight) + stages * (plan.slot_bytes(weight) + 16),
    )
    return out


VARIANTS = tuple(
    f"multiply_tiles<{source}, {gated}, {plan.groups}, {plan.tile_rows}>"
    for plan in (TILES_OF_32, TILES_OF_64, TILES_OF_128, TILES_OF_256)
    for source, gated in (
        ("PackedUnits", "true"),
        ("PackedUnits", "false"),
        ("PlainPairs", "true"),
        ("PlainRows", "false"),
    )
)


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name. It is compiled on first use, because a model needs only few."""
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)
