"""Gated weights as the kernels have them, for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows [32g, 32g + 16) are gate rows 16g.., the next 16 the up rows of the same."""
    n, k = gate.shape
    return torch.stack((gate.view(n // 16, 16, k), up.view(n // 16, 16, k)), 1).reshape(2 * n, k)
