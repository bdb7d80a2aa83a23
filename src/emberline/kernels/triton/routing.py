"""route_rows: selects the experts of each row, and sorts the rows by expert, for grouped products.

`kernels.reference.select_experts` defines the selection. An assignment is a pair (row, rank of an expert in the row);
its number is row * experts_per_row + rank. Assignments are sorted into tiles of equal size, each of one expert. Nothing
is synchronised with the host: the launches depend on the number of rows only, so they can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.mixture import Routing
from emberline.kernels.triton.jit import jit, jit_for_any, next_power_of_two, pdl_trigger_and_wait

FUSED_ROWS = (1, 8, 32)  # up to so many rows, each program of the sort selects the experts of all rows itself
MAX_CHUNK = 4096  # assignments that a program sorts at a time
MIN_BINS = 32  # of a histogram
LOWEST = constexpr(-3.4028234663852886e38)  # lowest finite float32, below all scores


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The assignments of rows to experts, sorted into tiles. All tensors are on the device."""

    weights: Tensor  # float32 [assignments]
    chosen: Tensor  # int32 [assignments], numbers of experts
    order: Tensor  # int32 [max_tiles * tile_rows], assignments; places that are not used hold the number of assignments
    tile_experts: Tensor  # int32 [max_tiles]
    num_tiles: Tensor  # int32 [1], tiles that are used
    tile_rows: int
    experts_per_row: int

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
    """Return the scores, LOWEST where the group of an expert is not among the best groups."""
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
def _place_tiles(
    counts: tensor, expert: tensor, assignments: tensor, order: tensor, tile_experts: tensor, num_tiles: tensor,
    BINS: constexpr, TILE_ROWS: constexpr,
) -> tensor:  # fmt: skip
    """Write which tiles are those of an expert, and return where in `order` its assignments begin.

    `counts`: the number of assignments of each expert. Places behind the expert's assignments are marked as unused.
    """
    number = tl.arange(0, BINS)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    before = tl.sum(tl.where(number < expert, tiles, 0), 0)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    own = (count + TILE_ROWS - 1) // TILE_ROWS
    for tile in range(own):
        tl.store(tile_experts + before + tile, expert)
    unused = count + tl.arange(0, TILE_ROWS)
    tl.store(order + before * TILE_ROWS + unused, assignments + unused * 0, unused < own * TILE_ROWS)
    return before * TILE_ROWS


@jit_for_any("rows")
def _select_rows(
    logits: tensor, correction: tensor, weights_out: tensor, chosen_out: tensor, rows: tensor, scale: tensor,
    ROWS: constexpr, EXPERTS: constexpr, EXPERTS_PADDED: constexpr, TOP: constexpr, TOP_PADDED: constexpr,
    SIGMOID: constexpr, HAS_CORRECTION: constexpr, GROUPS: constexpr, GROUPS_PADDED: constexpr,
    GROUPS_PER_ROW: constexpr, GROUP_BEST: constexpr, RENORMALIZE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
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


@jit_for_any("assignments")
def _sort(
    chosen: tensor, order: tensor, tile_experts: tensor, num_tiles: tensor, assignments: tensor,
    BINS: constexpr, CHUNK: constexpr, TILE_ROWS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Sort the assignments of one expert, in their order, into its tiles."""
    pdl_trigger_and_wait(PDL)
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, assignments, CHUNK):
        at = start + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(chosen + at, at < assignments, 0), BINS, mask=at < assignments)
    place = _place_tiles(counts, expert, assignments, order, tile_experts, num_tiles, BINS, TILE_ROWS)
    for start in range(0, assignments, CHUNK):
        at = start + tl.arange(0, CHUNK)
        is_own = tl.load(chosen + at, at < assignments, -1) == expert
        tl.store(order + place + tl.cumsum(is_own.to(tl.int32), 0) - 1, at, is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@jit_for_any("rows")
def _select_and_sort(
    logits: tensor, correction: tensor, weights_out: tensor, chosen_out: tensor, order: tensor, tile_experts: tensor,
    num_tiles: tensor, rows: tensor, scale: tensor,
    ROWS: constexpr, EXPERTS: constexpr, EXPERTS_PADDED: constexpr, TOP: constexpr, TOP_PADDED: constexpr,
    SIGMOID: constexpr, HAS_CORRECTION: constexpr, GROUPS: constexpr, GROUPS_PADDED: constexpr,
    GROUPS_PER_ROW: constexpr, GROUP_BEST: constexpr, RENORMALIZE: constexpr, BINS: constexpr, TILE_ROWS: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    """Select the experts of all rows, which each program does, and sort the assignments of one expert."""
    pdl_trigger_and_wait(PDL)
    expert = tl.program_id(0)
    row = tl.arange(0, ROWS)
    chosen, weights = _select(
        logits, correction, row, rows, scale, ROWS, EXPERTS, EXPERTS_PADDED, TOP, TOP_PADDED, SIGMOID, HAS_CORRECTION,
        GROUPS, GROUPS_PADDED, GROUPS_PER_ROW, GROUP_BEST, RENORMALIZE,
    )  # fmt: skip
    rank = tl.arange(0, TOP_PADDED)[None, :]
    inside = (row < rows)[:, None] & (rank < TOP)
    at = row[:, None] * TOP + rank
    if expert == 0:
        tl.store(weights_out + at, weights, inside)
        tl.store(chosen_out + at, chosen, inside)
    flat = tl.reshape(tl.where(inside, chosen, -1), [ROWS * TOP_PADDED])
    flat_at = tl.reshape(at + chosen * 0, [ROWS * TOP_PADDED])
    counts = tl.histogram(tl.maximum(flat, 0), BINS, mask=flat >= 0)
    place = _place_tiles(counts, expert, rows * TOP, order, tile_experts, num_tiles, BINS, TILE_ROWS)
    is_own = flat == expert
    tl.store(order + place + tl.cumsum(is_own.to(tl.int32), 0) - 1, flat_at, is_own)


def route_rows(logits: Tensor, routing: Routing, tile_rows: int, *, pdl: bool = False) -> SortedRows:
    """Return the experts that each row selects, sorted into tiles of `tile_rows` rows.

    `logits`: float32 [rows, experts], with the router's bias. There is at least one row.
    """
    rows, experts = logits.shape
    assert logits.dtype is torch.float32 and logits.is_contiguous() and rows
    top, correction = routing.experts_per_row, routing.correction
    assert routing.group_best in (1, 2) and experts % routing.groups == 0
    assignments = rows * top
    tiles = max_tile_count(assignments, experts, tile_rows)
    integers = torch.empty(assignments + tiles * (tile_rows + 1) + 1, dtype=torch.int32, device=logits.device)
    chosen, order, tile_experts, num_tiles = integers.split([assignments, tiles * tile_rows, tiles, 1])
    weights = torch.empty(assignments, dtype=torch.float32, device=logits.device)
    bins = max(MIN_BINS, next_power_of_two(experts))
    fused_rows = next((size for size in FUSED_ROWS if rows <= size), None)
    rules: dict[str, Any] = {
        "ROWS": fused_rows or max(1, min(16, 2048 // bins)),
        "EXPERTS": experts,
        "EXPERTS_PADDED": bins,
        "TOP": top,
        "TOP_PADDED": next_power_of_two(top),
        "SIGMOID": routing.scores == "sigmoid",
        "HAS_CORRECTION": correction is not None,
        "GROUPS": routing.groups,
        "GROUPS_PADDED": next_power_of_two(routing.groups),
        "GROUPS_PER_ROW": routing.groups_per_row,
        "GROUP_BEST": routing.group_best,
        "RENORMALIZE": routing.renormalize,
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": 4,
    }
    added = logits if correction is None else correction
    if fused_rows:
        _select_and_sort[(experts,)](
            logits, added, weights, chosen, order, tile_experts, num_tiles, rows, routing.scale,
            BINS=bins, TILE_ROWS=tile_rows, **rules,
        )  # fmt: skip
    else:
        _select_rows[(-(-rows // rules["ROWS"]),)](logits, added, weights, chosen, rows, routing.scale, **rules)
        _sort[(experts,)](
            chosen, order, tile_experts, num_tiles, assignments, BINS=bins,
            CHUNK=min(MAX_CHUNK, next_power_of_two(assignments)), TILE_ROWS=tile_rows, PDL=pdl,
            num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    return SortedRows(weights, chosen, order, tile_experts, num_tiles, tile_rows, top)
