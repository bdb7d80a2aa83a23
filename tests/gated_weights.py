"""Gate and up weights in the row order that the kernels expect."""

from __future__ import annotations

import torch
from torch import Tensor


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return 16 rows of `gate`, the same 16 rows of `up`, the next 16 rows of `gate`, and so on."""
    n, k = gate.shape
    return torch.stack((gate.view(n // 16, 16, k), up.view(n // 16, 16, k)), 1).reshape(2 * n, k)
