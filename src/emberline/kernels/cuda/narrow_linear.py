"""pack_weight, find_product: weights of linear layers that are 4-bit codes, and the kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from emberline.kernels.cuda import narrow, narrow_wide
from emberline.kernels.cuda.narrow_layout import FourBitWeight, pack
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix


def pack_weight(matrix: QuantisedMatrix, *, gated: bool = False) -> PackedWeight | None:
    """Return the matrix as a PackedWeight, or None if the kernels cannot read it."""
    if (packed := pack(matrix, gated=gated)) is None:
        return None
    layout, pointer = WeightLayout.QUANTISED, packed.data.data_ptr()
    return PackedWeight(packed.data, matrix.n, matrix.k, torch.bfloat16, layout, gated, pointer, packed)


def unpack(weight: PackedWeight) -> PackedWeight:
    """Return the weight as rows of bf16."""
    assert isinstance(weight.handle, FourBitWeight)
    rows = torch.empty(weight.n, weight.k, dtype=torch.bfloat16, device=weight.data.device)
    narrow.unpack(weight.handle, rows)
    return PackedWeight(rows, weight.n, weight.k, rows.dtype, WeightLayout.ROWS, weight.gated, rows.data_ptr())


def find_product(x: Tensor, weight: PackedWeight) -> Callable[..., Tensor] | None:
    """Return a kernel bound to x and the weight; None if the weight should be unpacked, because x has many rows."""
    handle = weight.handle
    assert isinstance(handle, FourBitWeight)
    if not weight.fixed_order and narrow_wide.supports(len(x), handle):
        return partial(narrow_wide.linear, x, handle)
    if weight.fixed_order:
        return partial(narrow.linear, x, handle, fixed_order=True)
    return partial(narrow.linear, x, handle) if len(x) <= narrow.MAX_ROWS else None
