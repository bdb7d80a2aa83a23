"""What attention, feed-forward and head are made of: weights packed once, from one tensor or several stacked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Linear:
    """y = norm(x) W^T + b, where the norm and the bias are optional; or the same added to a residual in place."""

    weight: ops.PackedWeight
    bias: Tensor | None = None
    norm: Tensor | None = None  # weight of the RMS norm in front
    eps: float = 0.0

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.weight, self.bias, norm=self.norm, eps=self.eps, add_to=add_to)


def stacked(weights: Weights, names: list[tuple[str, int]], columns: int) -> Tensor:
    """The matrices `name`.weight of so many rows each, one under the other, so that one call reads x once for all."""
    parts = [weights.matrix(f"{name}.weight", rows, columns) for name, rows in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stacked_bias(weights: Weights, names: list[tuple[str, int]]) -> Tensor:
    return torch.cat([weights.vector(f"{name}.bias", rows) for name, rows in names])


def load_linear(
    weights: Weights,
    names: list[tuple[str, int]],
    columns: int,
    *,
    bias: bool = False,
    norm: str | None = None,
    eps: float = 0.0,
) -> Linear:
    return Linear(
        ops.pack_linear(stacked(weights, names, columns)),
        stacked_bias(weights, names) if bias else None,
        None if norm is None else weights.vector(f"{norm}.weight", columns),
        eps,
    )
