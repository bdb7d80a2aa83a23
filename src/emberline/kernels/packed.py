"""A linear layer's weight in the order its kernel reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor, dtype


class Layout(IntEnum):
    """How `PackedWeight.data` lies; the native sources use the same numbers."""

    UW12 = -3  # about 12 bits a weight, to the bit what it was, on a GPU
    ROWS = -2  # [n, k] as it came, on a GPU
    PLAIN = -1  # [n, k] float32, for torch
    BF16 = 0  # panels of columns
    F32 = 1
    AMX = 2  # bf16 in panels of tiles for the matrix unit of x86, k padded to a tile's depth


@dataclass(slots=True, eq=False)
class PackedWeight:
    """On a GPU it may be empty until its values have come."""

    data: Tensor
    n: int
    k: int
    dtype: dtype  # of the weight as it came
    layout: Layout = Layout.PLAIN
    gated: bool = False  # each panel is half gate rows, half up rows; `n` counts both
    ptr: int = 0  # data.data_ptr(), read once: a call costs microseconds and this would be one of them
    handle: object | None = None  # what a GPU's kernel keeps beside it
    packed: object | None = None  # the same in 12 bits, where a GPU keeps both: for steps of few rows
