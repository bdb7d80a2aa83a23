"""PackedWeight, PackedExperts: weights in the memory layout that their kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor, dtype


class WeightLayout(IntEnum):
    """The memory layout of `PackedWeight.data`. The C++ sources use the same numbers."""

    PARTS = -5  # on a CPU: `parts` of different layouts
    QUANTISED = -4  # on a GPU: codes and scales; `handle` is a QuantisedMatrix, or what a kernel needs instead
    UW12 = -3  # on a GPU: lossless, about 12 bits per weight
    ROWS = -2  # on a GPU: [n, k] as in the checkpoint
    PLAIN = -1  # for torch: [n, k] float32
    BF16 = 0  # panels of columns in bf16
    F32 = 1  # panels of columns in float32
    BF16_TILES = 2  # bf16 in panels, in the order of the CPU's instruction for bf16; k is padded to a multiple of 32
    F16 = 3  # panels of columns in float16
    Q4_0 = 4  # this and the following: panels of columns with the codes and scales of GGUF blocks
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    IQ4_NL = 12
    MXFP4 = 13


@dataclass(slots=True, eq=False)
class PackedWeight:
    """A weight of shape [n, k]. On a GPU it may be empty until its values are loaded."""

    data: Tensor
    n: int
    k: int
    dtype: dtype  # dtype in the checkpoint
    layout: WeightLayout = WeightLayout.PLAIN
    gated: bool = False  # whether each panel is half gate rows, half up rows; `n` counts both
    ptr: int = 0  # data.data_ptr(), read once: an op takes microseconds, and calling it would add one
    handle: object | None = None  # what the GPU kernels need, such as a cuda.linear.BF16Weight
    uw12_copy: object | None = None  # a uw12 copy for steps of few rows, where a GPU keeps both forms
    fixed_order: bool = False  # on a GPU: the order of sums shall not depend on the number of rows of x
    parts: tuple[PackedWeight, ...] = ()  # consecutive rows of this weight; `data` is then empty

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + sum(part.data.nbytes for part in self.parts)


def join_rows(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Return one weight with the rows of several, which keep their layouts. None of them is gated."""
    first = parts[0]
    assert all(part.k == first.k and not part.gated for part in parts)
    rows = sum(part.n for part in parts)
    return PackedWeight(first.data[:0], rows, first.k, first.dtype, WeightLayout.PARTS, parts=tuple(parts))


@dataclass(slots=True, eq=False)
class PackedExperts:
    """The matrices [count, n, k] of all experts of a layer, in another form than a tensor of bf16.

    Until their values are loaded, `handle` may be a QuantisedMatrix on the meta device, or None. If the loaded values
    cannot be compressed, `handle` is a tensor after all, and the layout is ROWS."""

    count: int
    n: int
    k: int
    layout: WeightLayout  # UW12, QUANTISED or ROWS
    handle: object  # what the GPU kernels need; ROWS: the tensor
    nbytes: int
    gated: bool = False  # whether rows of gate and of up alternate in groups of 8, if the kernels want that
