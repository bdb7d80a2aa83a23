"""gate_up: computes silu(gate) * up for up to 256 rows of x, where both x and the weight are float8.

`gate_up.cu` has the kernel. Its tiles have enough rows of the weight that there is about one tile for each SM.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms, make_tensor_map
from emberline.kernels.cuda.fp8_weight import UNIT_K, FP8Weight
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES
from emberline.kernels.cuda.quantise_rows import QuantisedRows

FILE = "gate_up.cu"
MIN_ROWS = 33  # with fewer rows, x is a small part of what `cuda/fp8_wide.py` reads into an SM
GROUP_ROWS, CTA_ROWS, MAX_ROWS = 64, 128, 256  # rows of x of a warpgroup, of a CTA, and of two CTAs
WIDTHS = (128, 192, 224, 256)  # rows of the weight in a tile
SIZES = ((1, 1), (2, 1), (2, 2))  # warpgroups of a CTA, and CTAs of a cluster


def kernel_name(groups: int, width: int, ctas: int) -> str:
    return f"gate_up<{groups}, {width}, {ctas}>"


VARIANTS = tuple(kernel_name(groups, width, ctas) for (groups, ctas), width in product(SIZES, WIDTHS))


def supports(m: int, w: FP8Weight) -> bool:
    """Return whether `gate_up` supports this product and is faster than `cuda/fp8_wide.py`."""
    return MIN_ROWS <= m <= MAX_ROWS and not w.has_blocks and w.n >= WIDTHS[0] * count_sms() // 2


def gate_up(
    x: QuantisedRows, w: FP8Weight, *, out: Tensor, pdl: bool = True, width: int = 0, stages: int = 0
) -> Tensor:
    """Write silu(gate) * up, [m, n / 2], into `out` and return it. `width`, `stages`: chosen by shape if 0."""
    m, k = x.codes.shape
    assert m <= MAX_ROWS and k == w.k and x.scales.dim() == 1 and w.row_scales is not None
    assert out.shape == (m, w.n // 2) and out.is_contiguous() and out.dtype is torch.bfloat16
    ctas = -(-m // CTA_ROWS)
    groups, width = min(-(-m // GROUP_ROWS), CTA_ROWS // GROUP_ROWS), width or choose_width(w.n, ctas)
    slot = UNIT_K * (GROUP_ROWS * groups + width)
    stages = stages or (MAX_SHARED_BYTES - 1024) // (slot + 16)
    tiles = -(-w.n // width)
    _get_kernel(kernel_name(groups, width, ctas))(
        (ctas * -(-tiles // -(-tiles * ctas // count_sms())), 1, 1),
        128 * groups + 32,
        (
            w.get_tensor_map(width // ctas // 16),
            make_tensor_map(x.codes, (min(-(-m // 8) * 8, CTA_ROWS), UNIT_K)),
            *(w.row_scales, x.scales, out, w.n, k, m, stages, int(pdl)),
        ),
        pdl=pdl,
        cluster=ctas,
        shared_bytes=1024 + stages * (slot + 16),
    )
    return out


@cache
def choose_width(n: int, ctas: int) -> int:
    """Return the tile width (rows of the weight) with which the busiest SM computes the fewest rows.

    Of several such widths, the largest is returned. `ctas`: CTAs of a cluster, which compute the same rows of the
    weight.
    """
    return min(WIDTHS, key=lambda width: (width * -(-n * ctas // (width * count_sms())), -width))


@cache
def _get_kernel(name: str) -> CudaKernel:
    return CudaModule(FILE, [name]).kernel(name, MAX_SHARED_BYTES)
