"""route_rows: selects the experts of rows and sorts the rows by expert, like `triton/routing.py`, but faster.

`routing.cu` has the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule
from emberline.kernels.mixture import Routing
from emberline.kernels.triton import routing
from emberline.kernels.triton.routing import SortedRows, max_tile_count

FILE = "routing.cu"
EXPERTS_PER_LANE = (4, 8, 16)  # of a warp that selects the experts of a row
MAX_EXPERTS, MAX_EXPERTS_PER_ROW = 32 * EXPERTS_PER_LANE[-1], 32
TILE_GRAIN = 32  # the rows of a tile are a multiple of this, if an expert has several tiles
SELECT_THREADS, PLACE_THREADS = 256, 1024
CLUSTER, MAX_CLUSTER_ASSIGNMENTS = 8, 1024  # CTAs of one kernel for few rows, and the assignments of each
# Pairs (rows of a block, rows): the rows of a CTA, for so many rows at most.
ROWS_PER_BLOCK = ((8, 1024), (16, 2048), (32, 1 << 30))


def supports(experts: int, rules: Routing) -> bool:
    if rules.local_experts is not None:
        return False
    return experts <= MAX_EXPERTS and rules.experts_per_row <= MAX_EXPERTS_PER_ROW and rules.groups == 1


def choose_experts_per_lane(experts: int) -> int:
    return next(count for count in EXPERTS_PER_LANE if 32 * count >= experts)


def route_rows(logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool = True) -> SortedRows:
    """Return the experts that each row selects, sorted into tiles of `tile_rows` rows.

    `logits`: float32 [rows, experts], with the router's bias. There is at least one row.
    """
    rows, experts = logits.shape
    if not supports(experts, rules):
        return _with_places(routing.route_rows(logits, rules, tile_rows, pdl=pdl))
    assert logits.dtype is torch.float32 and logits.is_contiguous() and rows
    top, per_lane = rules.experts_per_row, choose_experts_per_lane(experts)
    assignments, tiles = rows * top, max_tile_count(rows * top, experts, tile_rows)
    sizes = [assignments] * 2 + [tiles * tile_rows, tiles, tiles, 1]
    integers = torch.empty(sum(sizes), dtype=torch.int32, device=logits.device)
    chosen, places, order, tile_experts, tile_counts, num_tiles = integers.split(sizes)
    weights = torch.empty(assignments, dtype=torch.float32, device=logits.device)
    found = SortedRows(weights, chosen, order, tile_experts, tile_counts, num_tiles, tile_rows, top, places)
    is_sigmoid, grain = rules.scores == "sigmoid", min(TILE_GRAIN, tile_rows)
    selection = logits, rules.correction, rows, experts, top, is_sigmoid, rules.renormalize, float(rules.scale)
    tables = order, places, tile_experts, tile_counts, num_tiles
    if -(-rows // CLUSTER) * top <= MAX_CLUSTER_ASSIGNMENTS:
        routed = *selection, tile_rows, grain, weights, chosen, *tables
        _get_kernel(f"route_rows<{per_lane}>")((CLUSTER, 1, 1), PLACE_THREADS, routed, pdl=pdl, cluster=CLUSTER)
        return found
    block_rows = next(size for size, limit in ROWS_PER_BLOCK if rows <= limit)
    blocks = -(-rows // block_rows)
    ranks, counts = torch.empty(assignments + blocks * 32 * per_lane, dtype=torch.int32, device=logits.device).split(
        [assignments, blocks * 32 * per_lane]
    )
    selected = *selection, block_rows, weights, chosen, ranks, counts
    _get_kernel(f"select_rows<{per_lane}>")((blocks, 1, 1), SELECT_THREADS, selected, pdl=pdl)
    placed = chosen, ranks, counts, rows, top, block_rows, tile_rows, grain, *tables
    _get_kernel(f"place_rows<{per_lane}>")((blocks, 1, 1), PLACE_THREADS, placed, pdl=pdl)
    return found


def _with_places(rows: SortedRows) -> SortedRows:
    """Return `rows` with `places`, the position of each assignment in `rows.order`."""
    order, size = rows.order.view(-1, rows.tile_rows), len(rows.weights)
    column, tile = torch.arange(rows.tile_rows, device=order.device), torch.arange(len(order), device=order.device)
    is_used = (column < rows.tile_counts[:, None]) & (tile < rows.num_tiles)[:, None]
    target = torch.where(is_used, order, size).flatten().long()
    places = torch.zeros(size + 1, dtype=torch.int32, device=order.device)  # those of other ranks' experts stay 0
    places.scatter_(0, target, torch.arange(len(target), dtype=torch.int32, device=order.device))
    return replace(rows, places=places[:size])


def sort_rows(x: Tensor, rows: SortedRows, *, pdl: bool = True) -> Tensor:
    """Return the rows of x copied to their places in the sorted tiles, [max_tiles * tile_rows, columns].

    Places without a row are not written.
    """
    assert rows.places is not None and x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0
    out = x.new_empty(rows.max_tiles * rows.tile_rows, x.shape[1])
    chunks = x.shape[1] * x.element_size() // 16
    arguments = (x, rows.places, rows.experts_per_row, chunks, out)
    _get_kernel("sort_rows")((len(x), 1, 1), SELECT_THREADS, arguments, pdl=pdl)
    return out


VARIANTS = (
    "sort_rows",
    *(f"{name}<{count}>" for name in ("route_rows", "select_rows", "place_rows") for count in EXPERTS_PER_LANE),
)


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel, already loaded, so that a launch inside `compile_in_parallel` runs it too.

    Triton kernels that are launched inside that block read the tables that this kernel writes."""
    return _get_module().kernel(kernel_name).load()


@cache
def _get_module() -> CudaModule:
    return CudaModule(FILE, VARIANTS)


def list_modules() -> list[CudaModule]:
    return [_get_module()]
