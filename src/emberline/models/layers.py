"""Loads linear layers. A layer's weight may be stacked from several tensors of a checkpoint."""

from __future__ import annotations

from torch import Tensor

from emberline.kernels import ops
from emberline.models.weights import Weights


def load_stacked(
    weights: Weights, names: list[tuple[str, int]], columns: int, *, gated: bool = False
) -> ops.PackedWeight:
    """Load several matrices (name, rows) as one stacked matrix, for one kernel call."""
    return weights.linear([(f"{name}.weight", rows) for name, rows in names], columns, gated=gated)


def load_stacked_bias(weights: Weights, names: list[tuple[str, int]]) -> Tensor:
    return weights.stack_vectors([(f"{name}.bias", rows) for name, rows in names])


def load_linear(
    weights: Weights,
    names: list[tuple[str, int]],
    columns: int,
    *,
    bias: bool = False,
    norm: str | None = None,
    eps: float = 0.0,
) -> ops.LinearLayer:
    return ops.LinearLayer(
        load_stacked(weights, names, columns),
        load_stacked_bias(weights, names) if bias else None,
        None if norm is None else weights.load_vector(f"{norm}.weight", columns),
        eps,
    )
