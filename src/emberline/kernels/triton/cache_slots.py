"""find_slots, shift_positions: find KV cache slots of tokens whose positions only the device knows."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.arguments import PositionShift
from emberline.kernels.triton.jit import jit

ROWS_PER_PROGRAM = 128


@jit
def _find_slots(
    position: tensor,
    limits: tensor,
    tables: tensor,
    at_out: tensor,
    slots_out: tensor,
    count: tensor,
    table_stride: tensor,
    BLOCK_SIZE: constexpr,
    SIZE: constexpr,
) -> None:
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    limit = tl.load(limits + i, inside, 0)
    at = tl.maximum(tl.minimum(tl.load(position + i, inside, 0), limit - 1), 0)
    block = tl.load(tables + i * table_stride + at // BLOCK_SIZE, inside, 0).to(tl.int64)
    tl.store(at_out + i, at.to(tl.int32), inside)
    tl.store(slots_out + i, tl.where(limit > 0, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), inside)


def find_slots(position: Tensor, limits: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the position (int32) and the slot (int64) of a token in each row; see `ops.find_slots`."""
    count = len(position)
    at = torch.empty(count, dtype=torch.int32, device=position.device)
    slots = torch.empty(count, dtype=torch.int64, device=position.device)
    assert position.is_contiguous() and limits.is_contiguous() and tables.stride(1) == 1
    if count:
        _find_slots[(-(-count // ROWS_PER_PROGRAM),)](
            position, limits, tables, at, slots, count, tables.stride(0), block_size, ROWS_PER_PROGRAM, num_warps=4
        )
    return at, slots


@jit
def _shift_positions(
    positions: tensor,
    slots: tensor,
    context: tensor,
    token_shifts: tensor,
    row_shifts: tensor,
    accepted: tensor,
    tables: tensor,
    tokens: tensor,
    rows: tensor,
    table_stride: tensor,
    padding_row: tensor,
    window_slots: tensor,
    slots_stride: tensor,
    table_width: tensor,
    WINDOWS: constexpr,
    BLOCK_SIZE: constexpr,
    SIZE: constexpr,
) -> None:
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(token_shifts + i, i < tokens, 0)
    shifted = (i < tokens) & (row != padding_row)
    at = tl.load(positions + i, shifted, 0) + tl.load(accepted + row, shifted, 0)
    block = tl.load(tables + row * table_stride + at // BLOCK_SIZE, shifted, 0).to(tl.int64)
    tl.store(positions + i, at.to(tl.int32), shifted)
    tl.store(slots + i, block * BLOCK_SIZE + at % BLOCK_SIZE, shifted)
    for group in tl.static_range(WINDOWS):
        entry = (group + 1) * table_width + at // BLOCK_SIZE
        block = tl.load(tables + row * table_stride + entry, shifted, 0).to(tl.int64)
        tl.store(window_slots + group * slots_stride + i, block * BLOCK_SIZE + at % BLOCK_SIZE, shifted)
    owner = tl.load(row_shifts + i, i < rows, 0)
    moved = (i < rows) & (owner != padding_row)
    start = tl.load(context + i, moved, 0) + tl.load(accepted + owner, moved, 0)
    tl.store(context + i, start.to(tl.int32), moved)


def shift_positions(shift: PositionShift) -> None:
    """Correct positions and KV cache slots in place by counts on the device; see PositionShift."""
    tokens, rows, further = len(shift.positions), len(shift.context), shift.window_slots
    windows = (shift.slots, 0, 0, 0)
    if further is not None:
        windows = further, further.stride(0), shift.table_width, len(further)
    if count := max(tokens, rows):
        _shift_positions[(-(-count // ROWS_PER_PROGRAM),)](
            *(*shift[:7], tokens, rows, shift.tables.stride(0), shift.padding_row),
            *(*windows, shift.block_size, ROWS_PER_PROGRAM),
            num_warps=4,
        )
