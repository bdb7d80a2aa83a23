"""Loads linear layers, and adds their products to the residual.

A layer's weight may be stacked from several tensors of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.config import ModelConfig
from emberline.models.row_exchange import RowExchange
from emberline.models.weights import Weights


def load_stacked(
    weights: Weights, names: list[tuple[str, int]], columns: int, *, gated: bool = False, packable: bool = True
) -> ops.PackedWeight:
    """Load several matrices (name, rows) as one stacked matrix, for one kernel call."""
    parts = [(f"{name}.weight", rows) for name, rows in names]
    return weights.linear(parts, columns, gated=gated, packable=packable)


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
    norm_offset: float = 0.0,
    packable: bool = True,
) -> ops.LinearLayer:
    return ops.LinearLayer(
        load_stacked(weights, names, columns, packable=packable),
        load_stacked_bias(weights, names) if bias else None,
        None if norm is None else weights.load_vector(f"{norm}.weight", columns, offset=norm_offset),
        eps,
    )


@dataclass(frozen=True, slots=True)
class OutputScaling:
    """What is done to the output of attention or a feed-forward network before it is added to the residual."""

    norm: Tensor | None  # weight of an RMS norm
    eps: float
    multiplier: float
    comm: Communicator | None = None  # sums the outputs of ranks, which have parts of the layer's columns

    @staticmethod
    def load(
        config: ModelConfig, weights: Weights, comm: Communicator | None, norm_name: str = ""
    ) -> OutputScaling | None:
        """Return the scaling, or None if outputs are added unchanged. `comm`: of the ranks that divide the layer."""
        parts = config.parts
        has_norm = parts.norms in ("post", "both")
        if not has_norm and parts.residual_multiplier == 1.0 and comm is None:
            return None
        norm = weights.load_vector(norm_name, config.hidden, offset=parts.norm_offset) if has_norm else None
        return OutputScaling(norm, config.norm_eps, parts.residual_multiplier, comm)

    @property
    def sums_only(self) -> bool:
        """Whether outputs of ranks are summed and not changed otherwise."""
        return self.comm is not None and self.norm is None and self.multiplier == 1.0


def add_output(
    inner: Tensor,
    layer: ops.LinearLayer,
    x: Tensor,
    scaling: OutputScaling | None,
    unpacker: ops.WeightUnpacker | None,
    exchange: RowExchange | None = None,
) -> Tensor:
    """Add the layer's output for `inner`, scaled, to x in place and return x.

    `exchange`: given if each rank has rows of its own in x; `inner` then has the rows of all ranks."""
    if scaling is None:
        return ops.linear(inner, layer, add_to=x, unpacker=unpacker)
    if scaling.comm is None:
        y = ops.linear(inner, layer, unpacker=unpacker)
    else:
        y = ops.linear(inner, ops.LinearLayer(layer.weight), unpacker=unpacker)
        if scaling.sums_only and layer.bias is None and exchange is None:
            return scaling.comm.all_reduce_add(x, y)
        y = scaling.comm.all_reduce(y) if exchange is None else exchange.reduce_scatter(y)
        if layer.bias is not None:
            y.add_(layer.bias)
    if scaling.norm is not None:
        ops.rms_norm(y, scaling.norm, scaling.eps, y)
    # A fused multiply-add would round differently in the tails of torch's vectorised loops.
    return x.add_(y if scaling.multiplier == 1.0 else y.mul_(scaling.multiplier))
