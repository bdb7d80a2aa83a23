"""linear: computes y = x w^T for 257 to 384 rows of x with packed weights, half of the rows at a time.

Each half reads and decodes the weight (`cuda/wide.py`). That is faster than unpacking the weight for cuBLAS.
"""

from __future__ import annotations

from torch import Tensor

from emberline.kernels.cuda import wide
from emberline.kernels.cuda.uw12 import UW12Weight

MAX_ROWS = 384
ROW_GRAIN = 8  # the first half has a multiple of so many rows: kernels copy x in pieces of 8 rows


def supports(m: int, n: int, k: int) -> bool:
    return wide.MAX_ROWS < m <= MAX_ROWS and wide.supports_shape(wide.MAX_ROWS, n, k)


def linear(
    x: Tensor,
    w: UW12Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
) -> Tensor:
    """Write x w^T into `out` and return it; the arguments are those of `cuda.linear.linear`."""
    assert supports(len(x), w.n, w.k)
    half = -(-len(x) // (2 * ROW_GRAIN)) * ROW_GRAIN
    for part in (slice(0, half), slice(half, len(x))):
        added = None if residual is None else residual[part]
        wide.linear(x[part], w, out=out[part], bias=bias, residual=added, gated=gated, pdl=pdl)
    return out
