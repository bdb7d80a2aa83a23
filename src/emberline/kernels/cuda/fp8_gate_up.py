"""gate_up: computes silu(gate) * up for up to 128 rows of x, where both x and the weight are float8.

`gate_up.cu` has the kernel, in which a tile has so many rows of the weight that there is about one for each SM.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, make_tensor_map
from emberline.kernels.cuda.fp8_weight import UNIT_K, FP8Weight
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES, NUM_SMS
from emberline.kernels.cuda.quantise_rows import QuantisedRows

FILE = "gate_up.cu"
MIN_ROWS = 33  # with fewer rows of x, those of `cuda/fp8_wide.py` take little of what enters an SM
GROUP_ROWS, MAX_ROWS = 64, 128  # rows of x that a warpgroup computes, and that two do
WIDTHS = (128, 192, 224, 256)  # rows of the weight in a tile


def kernel_name(groups: int, width: int) -> str:
    return f"gate_up<{groups}, {width}>"


VARIANTS = tuple(kernel_name(*sizes) for sizes in product((1, 2), WIDTHS))


def supports(m: int, w: FP8Weight) -> bool:
    """Return whether `gate_up` supports this product and is faster than `cuda/fp8_wide.py`."""
    return MIN_ROWS <= m <= MAX_ROWS and not w.has_blocks and w.n >= WIDTHS[0] * NUM_SMS // 2


def gate_up(
    x: QuantisedRows, w: FP8Weight, *, out: Tensor, pdl: bool = True, width: int = 0, stages: int = 0
) -> Tensor:
    """Write silu(gate) * up, [m, n / 2], into `out` and return it. `width`, `stages`: 0 for the chosen ones."""
    m, k = x.codes.shape
    assert m <= MAX_ROWS and k == w.k and x.scales.dim() == 1 and w.row_scales is not None
    assert out.shape == (m, w.n // 2) and out.is_contiguous() and out.dtype is torch.bfloat16
    groups, width = -(-m // GROUP_ROWS), width or choose_width(w.n)
    slot = UNIT_K * (GROUP_ROWS * groups + width)
    stages = stages or (MAX_SHARED_BYTES - 1024) // (slot + 16)
    tiles = -(-w.n // width)
    _get_kernel(kernel_name(groups, width))(
        (-(-tiles // -(-tiles // NUM_SMS)), 1, 1),
        128 * groups + 32,
        (
            w.get_tensor_map(width // 16),
            make_tensor_map(x.codes, (-(-m // 8) * 8, UNIT_K)),
            *(w.row_scales, x.scales, out, w.n, k, m, stages, int(pdl)),
        ),
        pdl=pdl,
        shared_bytes=1024 + stages * (slot + 16),
    )
    return out


@cache
def choose_width(n: int) -> int:
    """Return the width with which the busiest SM has the fewest rows of the weight, and of equal ones the largest."""
    return min(WIDTHS, key=lambda width: (width * -(-n // (width * NUM_SMS)), -width))


@cache
def _get_kernel(name: str) -> CudaKernel:
    return CudaModule(FILE, [name]).kernel(name, MAX_SHARED_BYTES)
