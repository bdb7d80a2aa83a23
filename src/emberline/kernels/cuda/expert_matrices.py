"""ExpertMatrices: the matrices of a layer's experts as the kernels of `few_experts.py` and `grouped.py` read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels.cuda import uw12
from emberline.kernels.cuda.driver import KernelArgument, make_tensor_map
from emberline.kernels.cuda.linear import SLOT_K
from emberline.kernels.cuda.uw12 import BLOCK_ROWS, UNIT_BYTES, PackedUnits, UW12Weight

PAIRED_ROWS = 8  # rows of gate, and as many rows of up, that a block of 16 rows of packed weights has
MAX_COPIED_WEIGHTS = 32 << 20  # elements that are copied at a time, to alternate rows of gate and of up


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices [count, n, k] of a layer's experts.

    `data` is a bf16 tensor, with the rows of gate before those of up, or one uw12 matrix of count * n rows. If the uw12
    matrix is `gated`, 8 rows of gate and 8 rows of up alternate in it.
    """

    data: Tensor | UW12Weight
    n: int
    k: int
    gated: bool = False

    @property
    def is_packed(self) -> bool:
        return isinstance(self.data, UW12Weight)

    @property
    def count(self) -> int:
        return self.data.n // self.n if isinstance(self.data, UW12Weight) else len(self.data)

    @property
    def source_name(self) -> str:
        """The C++ type through which kernels read the matrices."""
        return "PackedUnits" if self.is_packed else "PlainPairs" if self.gated else "PlainRows"

    @property
    def block_bytes(self) -> int:
        """Bytes of 16 rows x 64 columns."""
        return UNIT_BYTES if self.is_packed else 2 * BLOCK_ROWS * SLOT_K

    @property
    def header_stride(self) -> int:
        return self.data.header_stride if isinstance(self.data, UW12Weight) else 0

    def make_argument(self, blocks: int) -> KernelArgument:
        """Return the matrices as an argument of a kernel that fetches `blocks` blocks of 16 rows at a time."""
        if isinstance(self.data, UW12Weight):
            return PackedUnits.from_weight(self.data)
        if not self.gated:
            return make_tensor_map(self.data.flatten(0, 1), (BLOCK_ROWS * blocks, SLOT_K))
        pairs = self.data.view(len(self.data), 2, -1, PAIRED_ROWS, self.k).transpose(1, 2)
        return make_tensor_map(pairs, (1, blocks, 2, PAIRED_ROWS, SLOT_K))


def interleave_gate_up(stack: Tensor) -> Tensor:
    """Return a copy of [experts, 2 * width, k] in which 8 rows of gate and the 8 matching rows of up alternate."""
    count, rows, columns = stack.shape
    return stack.view(count, 2, rows // (2 * PAIRED_ROWS), PAIRED_ROWS, columns).transpose(1, 2).reshape(stack.shape)


def pack_experts(stack: Tensor, *, gated: bool) -> UW12Weight | None:
    """Return the matrices [experts, n, k] as uw12, or None if that is unsupported or does not save enough.

    `gated`: whether each matrix has the rows of gate, then those of up. Gated matrices are reordered in copies of a few
    experts at a time.
    """
    count, n, k = stack.shape
    if stack.dtype is not torch.bfloat16 or n % 128 or not uw12.supports(count * n, k):
        return None
    step = max(1, MAX_COPIED_WEIGHTS // (n * k))

    def make_pieces() -> Iterator[Tensor]:
        for part in stack.split(step) if gated else (stack,):
            yield (interleave_gate_up(part) if gated else part).flatten(0, 1)

    return uw12.pack_pieces(count * n, k, make_pieces, stack.device)
