"""count_packed_bytes: the size of a matrix of 4-bit codes as the kernels for an H100 or H200 keep it.

This module does not import torch."""

from __future__ import annotations

BLOCK_ROWS, GROUP_BLOCKS = 16, 4  # rows of a block; blocks whose units are adjacent, so that rows are padded to 64
UNIT_COLUMNS = 128  # of a unit, which has the codes of a block's rows, then the scales of each
CODE_BYTES = BLOCK_ROWS * UNIT_COLUMNS // 2  # of a unit
GROUPS_PER_UNIT = {"int4": (1, 2, 4), "mxfp4": (4,), "nvfp4": (8,)}
SCALE_BYTES = {"int4": 2, "mxfp4": 1, "nvfp4": 1}
ZERO_BYTES, ROW_SCALE_BYTES = 2, {"nvfp4": 4}


def count_groups_per_unit(kind: str, columns: int, group_columns: int) -> int | None:
    """Return how many scales a row has in a unit (128 columns); None: the layout lacks such groups."""
    group = min(group_columns or columns, columns)
    divides = group == columns or UNIT_COLUMNS % group == 0 or group % UNIT_COLUMNS == 0
    groups = UNIT_COLUMNS // group if UNIT_COLUMNS % group == 0 else 1
    return groups if divides and groups in GROUPS_PER_UNIT.get(kind, ()) else None


def can_pack(kind: str, rows: int, columns: int, group_columns: int) -> bool:
    has_blocks = rows % (2 * BLOCK_ROWS) == 0 and columns % BLOCK_ROWS == 0
    return has_blocks and count_groups_per_unit(kind, columns, group_columns) is not None


def count_packed_bytes(kind: str, rows: int, columns: int, group_columns: int, *, has_zeros: bool = False) -> int:
    """Return the bytes of a packed matrix, padding included. `can_pack` must be true for the matrix."""
    groups = count_groups_per_unit(kind, columns, group_columns)
    assert groups is not None, f"{kind} with groups of {group_columns} columns"
    unit = CODE_BYTES + BLOCK_ROWS * groups * (SCALE_BYTES[kind] + ZERO_BYTES * has_zeros)
    padded = -(-rows // (BLOCK_ROWS * GROUP_BLOCKS)) * BLOCK_ROWS * GROUP_BLOCKS
    return padded // BLOCK_ROWS * -(-columns // UNIT_COLUMNS) * unit + padded * ROW_SCALE_BYTES.get(kind, 0)
