"""Linear: the linear layer of all parts of a model, with weights stacked from one or more tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Linear:
    """y = norm(x) W^T + b with optional norm and bias, returned or added to a residual in place."""

    weight: ops.PackedWeight
    bias: Tensor | None = None
    norm: Tensor | None = None  # weight of the RMS norm applied to the input
    eps: float = 0.0

    def __call__(
        self,
        x: Tensor,
        add_to: Tensor | None = None,
        *,
        out: Tensor | None = None,
        float32_output: bool = False,
        unpacker: ops.WeightUnpacker | None = None,
    ) -> Tensor:
        norm, eps = self.norm, self.eps
        return ops.linear(
            x,
            self.weight,
            self.bias,
            norm=norm,
            eps=eps,
            add_to=add_to,
            out=out,
            float32_output=float32_output,
            unpacker=unpacker,
        )


def load_stacked(
    weights: Weights, names: list[tuple[str, int]], columns: int, *, gated: bool = False
) -> ops.PackedWeight:
    """Load matrices (name, rows) stacked into one, so that one kernel call computes all their products."""
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
) -> Linear:
    return Linear(
        load_stacked(weights, names, columns),
        load_stacked_bias(weights, names) if bias else None,
        None if norm is None else weights.vector(f"{norm}.weight", columns),
        eps,
    )
