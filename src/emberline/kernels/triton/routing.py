"""route_rows: selects the experts of each row, and sorts the rows by expert, for grouped products.

`kernels.mixture.select_experts` defines the selection. An assignment is a pair (row, rank of an expert in the row);
its number is row * experts_per_row + rank. Assignments are sorted into tiles of equal size, each of one expert. Nothing
is synchronised with the host: the launches depend on the number of rows only, so they can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.mixture import Routing
from emberline.kernels.triton.jit import jit, jit_without_specializing, next_power_of_two, pdl_trigger_and_wait

# Up to so many rows, one program selects the experts and sorts the rows; with 16 it takes minutes to compile.
FUSED_ROWS = (1, 4)
SELECTED_ROWS = 4  # of a program that selects experts, if the rows are few: one for each warp
# Up to so many assignments, a program for each expert finds all its assignments. Each number is a kernel of its own.
ASSIGNMENTS_AT_ONCE = (128, 512, 1024)
MAX_BLOCK_SCORES = 2048  # of a block: the rows of a program that selects experts
BLOCKS_PER_SORT = 4  # blocks that a program sorts, if there are many
COUNTED_BLOCKS = constexpr(32)  # blocks whose counts are added at a time
TILE_CHUNK = constexpr(16)  # tiles that are described at a time
MIN_BINS = 32  # experts for which counts are kept, at least
LOWEST = constexpr(-3.4028234663852886e38)  # lowest finite float32, below all scores


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The assignments of rows to experts, sorted into tiles. All tensors are on the device."""

    weights: Tensor  # float32 [assignments]
    chosen: Tensor  # int32 [assignments], numbers of experts
    order: Tensor  # int32 [max_tiles * tile_rows], assignments
    tile_experts: Tensor  # int32 [max_tiles]
    tile_counts: Tensor  # int32 [max_tiles], assignments of each tile, which are the first of its places in `order`
    num_tiles: Tensor  # int32 [1], tiles that are used
    tile_rows: int
    experts_per_row: int
    places: Tensor | None = None  # int32 [assignments], the place of each in `order`, if it was written

    @property
    def max_tiles(self) -> int:
        return len(self.tile_experts)


def max_tile_count(assignments: int, experts: int, tile_rows: int) -> int:
    """Return the most tiles that so many assignments can have."""
    return (assignments + min(experts, assignments) * (tile_rows - 1)) // tile_rows


@jit
def _limit_to_groups(
    choice: tensor, expert: tensor, ROWS: constexpr, GROUPS: constexpr, GROUPS_PADDED: constexpr,
    GROUP_SIZE: constexpr, GROUPS_PER_ROW: constexpr, GROUP_BEST: constexpr,
) -> tensor:  # fmt: skip
    """Return the scores `choice`, but LOWEST for experts whose group is not among the best groups of the row."""
    group = tl.arange(0, GROUPS_PADDED)[None, :]
    score = tl.full([ROWS, GROUPS_PADDED], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        members = tl.where(expert // GROUP_SIZE == number, choice, float("-inf"))
        best = tl.max(members, 1)
        if GROUP_BEST == 2:
            first = tl.argmax(members, 1)[:, None]
            best += tl.max(tl.where(expert == first, float("-inf"), members), 1)
        score = tl.where(group == number, best[:, None], score)
    is_allowed = expert < 0
    for _ in tl.static_range(GROUPS_PER_ROW):
        picked = tl.argmax(score, 1)[:, None]
        is_allowed = is_allowed | (expert // GROUP_SIZE == picked)
        score = tl.where(group == picked, float("-inf"), score)
    return tl.where(is_allowed, choice, LOWEST)


@jit
def _select(
    logits: tensor, correction: tensor, row: tensor, rows: tensor, scale: tensor, ROWS: constexpr, EXPERTS: constexpr,
    EXPERTS_PADDED: constexpr, TOP: constexpr, TOP_PADDED: constexpr, SIGMOID: constexpr, HAS_CORRECTION: constexpr,
    GROUPS: constexpr, GROUPS_PADDED: constexpr, GROUPS_PER_ROW: constexpr, GROUP_BEST: constexpr,
    RENORMALIZE: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the numbers and the weights of the experts of some rows, both [ROWS, TOP_PADDED].

    The numbers are valid also if logits are NaN, as they may be before the weights of a model are loaded.
    """
    expert = tl.arange(0, EXPERTS_PADDED)[None, :]
    exists = expert < EXPERTS
    at = row.to(tl.int64)[:, None] * EXPERTS + expert
    value = tl.load(logits + at, (row < rows)[:, None] & exists, 0.0)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        score = tl.where(exists, value, float("-inf"))
        score = tl.exp(score - tl.max(score, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    choice = score
    if HAS_CORRECTION:
        choice = score + tl.load(correction + expert, exists, 0.0)
    elif SIGMOID and GROUPS == 1:
        choice = value  # the sigmoids of large logits are equal
    choice = tl.where(choice > LOWEST, choice, LOWEST)  # also NaN
    choice = tl.where(exists, choice, float("-inf"))
    if GROUPS > 1:
        choice = _limit_to_groups(
            choice, expert, ROWS, GROUPS, GROUPS_PADDED, EXPERTS // GROUPS, GROUPS_PER_ROW, GROUP_BEST
        )
        choice = tl.where(exists, choice, float("-inf"))
    rank = tl.arange(0, TOP_PADDED)[None, :]
    chosen = tl.zeros([ROWS, TOP_PADDED], tl.int32)
    weights = tl.zeros([ROWS, TOP_PADDED], tl.float32)
    for number in tl.static_range(TOP):
        best = tl.argmax(choice, 1)[:, None]
        is_best = expert == best
        weight = tl.sum(tl.where(is_best, score, 0.0), 1)[:, None]
        chosen = tl.where(rank == number, best, chosen)
        weights = tl.where(rank == number, weight, weights)
        choice = tl.where(is_best, float("-inf"), choice)
    if RENORMALIZE:
        total = tl.sum(weights, 1)[:, None]
        weights = weights / (total + 1e-20 if SIGMOID else total)
    return chosen, weights * scale


@jit
def _count_experts(chosen: tensor, BINS: constexpr) -> tensor:
    """Return how often each expert occurs in a vector; other numbers than those of experts are not counted."""
    return tl.sum((chosen[:, None] == tl.arange(0, BINS)[None, :]).to(tl.int32), 0)


@jit
def _describe_tiles(
    totals: tensor, first: tensor, step: tensor, tile_experts: tensor, tile_counts: tensor, num_tiles: tensor,
    BINS: constexpr, TILE_ROWS: constexpr,
) -> tensor:  # fmt: skip
    """Write the expert and assignment count of some tiles; return where experts begin in `order`.

    `totals`: assignments of each expert. This program describes each chunk of tiles whose number is `first`, `first` +
    `step`, and so on.
    """
    tiles = (totals + TILE_ROWS - 1) // TILE_ROWS
    end = tl.cumsum(tiles, 0)
    start = end - tiles
    count = tl.sum(tiles, 0)
    if first == 0:
        tl.store(num_tiles, count)
    number = tl.arange(0, BINS)[None, :]
    for chunk in range(first * TILE_CHUNK, count, step * TILE_CHUNK):
        tile = chunk + tl.arange(0, TILE_CHUNK)
        expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
        left = totals[None, :] - (tile[:, None] - start[None, :]) * TILE_ROWS
        left = tl.sum(tl.where(number == expert[:, None], left, 0), 1)
        tl.store(tile_experts + tile, expert, tile < count)
        tl.store(tile_counts + tile, tl.minimum(left, TILE_ROWS), tile < count)
    return start * TILE_ROWS


@jit
def _write_order(
    chosen: tensor, assignment: tensor, places: tensor, order: tensor, SIZE: constexpr, BINS: constexpr
) -> None:
    """Write assignments to `order`, those of each expert one after the other from the index places[expert] on.

    `chosen`: the expert of each assignment; -1: the assignment is not written."""
    index = tl.arange(0, SIZE)
    is_before = (chosen[:, None] == chosen[None, :]) & (index[None, :] < index[:, None])
    rank = tl.sum(is_before.to(tl.int32), 1)
    is_expert = chosen[:, None] == tl.arange(0, BINS)[None, :]
    place = tl.sum(tl.where(is_expert, places[None, :], 0), 1)
    tl.store(order + place + rank, assignment, chosen >= 0)


@jit_without_specializing("rows")
def _select_rows(
    logits: tensor, correction: tensor, weights_out: tensor, chosen_out: tensor, counts: tensor, rows: tensor,
    scale: tensor,
    ROWS: constexpr, EXPERTS: constexpr, EXPERTS_PADDED: constexpr, TOP: constexpr, TOP_PADDED: constexpr,
    SIGMOID: constexpr, HAS_CORRECTION: constexpr, GROUPS: constexpr, GROUPS_PADDED: constexpr,
    GROUPS_PER_ROW: constexpr, GROUP_BEST: constexpr, RENORMALIZE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Select the experts of a block of rows, and count them."""
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chosen, weights = _select(
        logits, correction, row, rows, scale, ROWS, EXPERTS, EXPERTS_PADDED, TOP, TOP_PADDED, SIGMOID, HAS_CORRECTION,
        GROUPS, GROUPS_PADDED, GROUPS_PER_ROW, GROUP_BEST, RENORMALIZE,
    )  # fmt: skip
    rank = tl.arange(0, TOP_PADDED)[None, :]
    inside = (row < rows)[:, None] & (rank < TOP)
    tl.store(weights_out + row[:, None] * TOP + rank, weights, inside)
    tl.store(chosen_out + row[:, None] * TOP + rank, chosen, inside)
    flat = tl.reshape(tl.where(inside, chosen, -1), [ROWS * TOP_PADDED])
    number = tl.arange(0, EXPERTS_PADDED)
    tl.store(counts + tl.program_id(0) * EXPERTS_PADDED + number, _count_experts(flat, EXPERTS_PADDED))


@jit_without_specializing("blocks", "assignments")
def _sort_blocks(
    chosen: tensor, counts: tensor, order: tensor, tile_experts: tensor, tile_counts: tensor, num_tiles: tensor,
    blocks: tensor, assignments: tensor,
    BLOCK: constexpr, SIZE: constexpr, SPAN: constexpr, BINS: constexpr, TILE_ROWS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Sort SPAN blocks of BLOCK assignments, in their order, into the tiles of their experts."""
    pdl_trigger_and_wait(PDL)
    first = tl.program_id(0) * SPAN
    number = tl.arange(0, BINS)
    totals = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, blocks, COUNTED_BLOCKS):
        block = (start + tl.arange(0, COUNTED_BLOCKS))[:, None]
        part = tl.load(counts + block * BINS + number[None, :], block < blocks, 0)
        totals += tl.sum(part, 0)
        before += tl.sum(tl.where(block < first, part, 0), 0)
    places = before + _describe_tiles(
        totals, tl.program_id(0), tl.num_programs(0), tile_experts, tile_counts, num_tiles, BINS, TILE_ROWS
    )
    for block in range(first, tl.minimum(first + SPAN, blocks)):
        index = tl.arange(0, SIZE)
        at = block * BLOCK + index
        own = tl.load(chosen + at, (index < BLOCK) & (at < assignments), -1)
        _write_order(own, at, places, order, SIZE, BINS)
        places += tl.load(counts + block * BINS + number)


@jit_without_specializing("blocks", "assignments")
def _sort_by_expert(
    chosen: tensor, counts: tensor, order: tensor, tile_experts: tensor, tile_counts: tensor, num_tiles: tensor,
    blocks: tensor, assignments: tensor,
    SIZE: constexpr, BLOCKS: constexpr, BINS: constexpr, MAX_TILES: constexpr, TILE_ROWS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Sort the assignments of one expert into its tiles, and describe these tiles.

    SIZE is at least the number of assignments of all experts, and BLOCKS at least the number of blocks in `counts`."""
    pdl_trigger_and_wait(PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, SIZE)
    own = tl.load(chosen + index, index < assignments, -1)
    block, number = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BINS)
    totals = tl.sum(tl.load(counts + block * BINS + number[None, :], block < blocks, 0), 0)
    tiles = (totals + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(number < expert, tiles, 0), 0)
    is_own = own == expert
    rank = tl.cumsum(is_own.to(tl.int32), 0) - 1
    tl.store(order + first * TILE_ROWS + rank, index, is_own)
    left = tl.sum(is_own.to(tl.int32), 0) - tl.arange(0, MAX_TILES) * TILE_ROWS
    tile = first + tl.arange(0, MAX_TILES)
    tl.store(tile_experts + tile, tl.zeros([MAX_TILES], tl.int32) + expert, left > 0)
    tl.store(tile_counts + tile, tl.minimum(left, TILE_ROWS), left > 0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))


@jit_without_specializing("rows")
def _select_and_sort(
    logits: tensor, correction: tensor, weights_out: tensor, chosen_out: tensor, order: tensor, tile_experts: tensor,
    tile_counts: tensor, num_tiles: tensor, rows: tensor, scale: tensor,
    ROWS: constexpr, EXPERTS: constexpr, EXPERTS_PADDED: constexpr, TOP: constexpr, TOP_PADDED: constexpr,
    SIGMOID: constexpr, HAS_CORRECTION: constexpr, GROUPS: constexpr, GROUPS_PADDED: constexpr,
    GROUPS_PER_ROW: constexpr, GROUP_BEST: constexpr, RENORMALIZE: constexpr, TILE_ROWS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Select the experts of all rows, and sort the rows by expert."""
    pdl_trigger_and_wait(PDL)
    row = tl.arange(0, ROWS)
    chosen, weights = _select(
        logits, correction, row, rows, scale, ROWS, EXPERTS, EXPERTS_PADDED, TOP, TOP_PADDED, SIGMOID, HAS_CORRECTION,
        GROUPS, GROUPS_PADDED, GROUPS_PER_ROW, GROUP_BEST, RENORMALIZE,
    )  # fmt: skip
    rank = tl.arange(0, TOP_PADDED)[None, :]
    inside = (row < rows)[:, None] & (rank < TOP)
    tl.store(weights_out + row[:, None] * TOP + rank, weights, inside)
    tl.store(chosen_out + row[:, None] * TOP + rank, chosen, inside)
    flat = tl.reshape(tl.where(inside, chosen, -1), [ROWS * TOP_PADDED])
    totals = _count_experts(flat, EXPERTS_PADDED)
    places = _describe_tiles(totals, 0, 1, tile_experts, tile_counts, num_tiles, EXPERTS_PADDED, TILE_ROWS)
    index = tl.arange(0, ROWS * TOP_PADDED)
    assignment = index // TOP_PADDED * TOP + index % TOP_PADDED
    _write_order(flat, assignment, places, order, ROWS * TOP_PADDED, EXPERTS_PADDED)


def _selection_options(routing: Routing, experts: int, block_rows: int, *, pdl: bool) -> dict[str, Any]:
    """Return the compile-time and launch options of kernels that select experts, for blocks of `block_rows` rows."""
    return {
        "ROWS": block_rows,
        "EXPERTS": experts,
        "EXPERTS_PADDED": next_power_of_two(max(experts, MIN_BINS)),
        "TOP": routing.experts_per_row,
        "TOP_PADDED": next_power_of_two(routing.experts_per_row),
        "SIGMOID": routing.scores == "sigmoid",
        "HAS_CORRECTION": routing.correction is not None,
        "GROUPS": routing.groups,
        "GROUPS_PADDED": next_power_of_two(routing.groups),
        "GROUPS_PER_ROW": routing.groups_per_row,
        "GROUP_BEST": routing.group_best,
        "RENORMALIZE": routing.renormalize,
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": min(4, block_rows),  # the scores of a row are compared within a warp, if the rows are few
    }


def route_rows(logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool = False) -> SortedRows:
    """Return the experts that each row selects, sorted into tiles of `tile_rows` rows.

    `logits`: float32 [rows, experts], with the router's bias. There is at least one row. If this rank has only
    some of the experts, the result has only the tiles of these experts.
    """
    found = route_to_all(logits, rules, tile_rows, pdl=pdl)
    return found if rules.local_experts is None else select_local_tiles(found, rules.local_experts)


def select_tiles(rows: SortedRows, tiles: slice) -> SortedRows:
    """Return the sorted rows with only the tiles whose indexes are in the slice `tiles`."""
    if tiles == slice(0, rows.max_tiles):
        return rows
    return replace(
        rows,
        order=rows.order[tiles.start * rows.tile_rows : tiles.stop * rows.tile_rows],
        tile_experts=rows.tile_experts[tiles],
        tile_counts=rows.tile_counts[tiles],
        num_tiles=(rows.num_tiles - tiles.start).clamp_(0, tiles.stop - tiles.start),
    )


def select_local_tiles(rows: SortedRows, local: range) -> SortedRows:
    """Return the sorted rows with only the tiles of the experts `local`, which are renumbered from 0."""
    tile = torch.arange(rows.max_tiles, device=rows.chosen.device)
    is_used = tile < rows.num_tiles
    first = (is_used & (rows.tile_experts < local.start)).sum()  # tiles are sorted by expert
    count = (is_used & (rows.tile_experts >= local.start) & (rows.tile_experts < local.stop)).sum()
    at = (tile + first).clamp_(max=rows.max_tiles - 1)
    return replace(
        rows,
        order=rows.order.view(-1, rows.tile_rows)[at].flatten(),
        tile_experts=(rows.tile_experts[at] - local.start).clamp_(0, len(local) - 1),
        tile_counts=rows.tile_counts[at],
        num_tiles=count.to(torch.int32).view(1),
    )


def clear_other_outputs(outputs: Tensor, rows: SortedRows, local: range | None) -> Tensor:
    """Set outputs of experts outside `local`, which are not computed, to 0 in place; return `outputs`."""
    if local is None:
        return outputs
    return outputs.masked_fill_(((rows.chosen < local.start) | (rows.chosen >= local.stop))[:, None], 0)


def route_to_all(logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool) -> SortedRows:
    """Return the experts that each row selects, with the tiles of all experts, whatever `rules.local_experts` says."""
    rows, experts = logits.shape
    assert logits.dtype is torch.float32 and logits.is_contiguous() and rows
    top, correction = rules.experts_per_row, rules.correction
    assert rules.group_best in (1, 2) and experts % rules.groups == 0
    assignments, bins = rows * top, next_power_of_two(max(experts, MIN_BINS))
    tiles = max_tile_count(assignments, experts, tile_rows)
    fused_rows = next((size for size in FUSED_ROWS if rows <= size), None)
    at_once = next((size for size in ASSIGNMENTS_AT_ONCE if assignments <= size), None)
    block_rows = fused_rows or (SELECTED_ROWS if at_once else max(1, min(16, MAX_BLOCK_SCORES // bins)))
    blocks = -(-rows // block_rows)
    sizes = [assignments, tiles * tile_rows, tiles, tiles, 1, blocks * bins]
    integers = torch.empty(sum(sizes), dtype=torch.int32, device=logits.device)
    chosen, order, tile_experts, tile_counts, num_tiles, counts = integers.split(sizes)
    weights = torch.empty(assignments, dtype=torch.float32, device=logits.device)
    options = _selection_options(rules, experts, block_rows, pdl=pdl)
    added = logits if correction is None else correction
    found = SortedRows(weights, chosen, order, tile_experts, tile_counts, num_tiles, tile_rows, top)
    if fused_rows:
        _select_and_sort[(1,)](
            logits, added, weights, chosen, order, tile_experts, tile_counts, num_tiles, rows, rules.scale,
            TILE_ROWS=tile_rows, **options,
        )  # fmt: skip
        return found
    _select_rows[(blocks,)](logits, added, weights, chosen, counts, rows, rules.scale, **options)
    if at_once:
        max_rows = at_once // top
        _sort_by_expert[(experts,)](
            chosen, counts, order, tile_experts, tile_counts, num_tiles, blocks, assignments,
            SIZE=at_once, BLOCKS=next_power_of_two(-(-max_rows // SELECTED_ROWS)), BINS=bins,
            MAX_TILES=next_power_of_two(-(-max_rows // tile_rows)), TILE_ROWS=tile_rows, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return found
    span, block = 1 if blocks <= COUNTED_BLOCKS.value else BLOCKS_PER_SORT, block_rows * top
    _sort_blocks[(-(-blocks // span),)](
        chosen, counts, order, tile_experts, tile_counts, num_tiles, blocks, assignments,
        BLOCK=block, SIZE=next_power_of_two(block), SPAN=span, BINS=bins, TILE_ROWS=tile_rows, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return found
