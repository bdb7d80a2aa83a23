"""Sums of outputs whose bits depend neither on the order of the terms nor on which rank adds which of them.

Each term is rounded to a multiple of 2 ** -32 in float64, by `round_term`. While a sum stays below 2 ** 21, each
addition is exact, so the order does not matter. Above that, an addition may round by less than one part in 2 ** 52,
and the last bits may depend on the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The float64 numbers around this one are 2 ** -32 apart: adding and subtracting it rounds to a multiple of that.
ROUNDER = 1.5 * 2.0**20


def round_term(x: Tensor) -> Tensor:
    """Return x in float64, rounded to multiples of 2 ** -32."""
    return x.to(torch.float64).add_(ROUNDER).sub_(ROUNDER)
