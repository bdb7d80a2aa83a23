"""FeedForward: the gated feed-forward network, including norm and residual. Its activation is silu or gelu.

`moe.py` has mixtures of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder_parts import Activation
from emberline.models.layers import OutputScaling, add_output, load_linear, load_stacked
from emberline.models.row_exchange import RowExchange
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate_up: ops.LinearLayer
    down: ops.LinearLayer
    activation: Activation = "silu"
    scaling: OutputScaling | None = None

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int) -> FeedForward:
        return FeedForward.load_from(config, weights, f"model.layers.{layer}")

    @staticmethod
    def load_from(config: ModelConfig, weights: Weights, at: str) -> FeedForward:
        """Load the network of a layer. `at`: how the names of the layer's tensors begin."""
        parts, norm = config.parts, _norm_name(config, at)
        module = f"{at}.{parts.down_tensor.rpartition('.')[0]}"
        names = [(f"{module}.gate_proj", config.ffn), (f"{module}.up_proj", config.ffn)]
        names = [(f"{at}.{parts.gate_up_tensor}", 2 * config.ffn)] if parts.gate_up_tensor else names
        return FeedForward(
            gate_up=ops.LinearLayer(
                load_stacked(weights, names, config.hidden, gated=True),
                norm=None if norm is None else weights.load_vector(norm, config.hidden, offset=parts.norm_offset),
                eps=config.norm_eps,
            ),
            down=load_linear(weights, [(f"{at}.{parts.down_tensor}", config.hidden)], config.ffn),
            activation=parts.activation,
            scaling=OutputScaling.load(config, weights, weights.comm, f"{at}.post_feedforward_layernorm.weight"),
        )

    def __call__(
        self,
        x: Tensor,
        unpacker: ops.WeightUnpacker | None = None,
        exchange: RowExchange | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute the network's output and add it to x in place. `inputs`: of the network; None: x.

        `exchange`: moves rows between ranks, if each has rows of its own."""
        inputs = x if inputs is None else inputs
        inner = self.compute_inner(inputs if exchange is None else exchange.gather(inputs), self.gate_up, unpacker)
        return add_output(inner, self.down, x, self.scaling, unpacker, exchange)

    def compute_inner(self, x: Tensor, gate_up: ops.LinearLayer, unpacker: ops.WeightUnpacker | None) -> Tensor:
        """Return activation(gate(x)) * up(x), the input of the down projection."""
        product = ops.gate_up_silu if self.activation == "silu" else ops.gate_up_gelu
        return product(x, gate_up, unpacker=unpacker)


@dataclass(frozen=True, slots=True)
class BiasedFeedForward:
    """A gated feed-forward network with biases, computed by general ops because few models have biases."""

    gate_up: ops.LinearLayer
    down: ops.LinearLayer
    activation: Activation = "silu"
    scaling: OutputScaling | None = None

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int) -> BiasedFeedForward:
        at = f"model.layers.{layer}"
        names = [(f"{at}.mlp.gate_proj", config.ffn), (f"{at}.mlp.up_proj", config.ffn)]
        norm = f"{at}.post_attention_layernorm"
        assert config.parts.norms == "pre" and not config.parts.gate_up_tensor
        return BiasedFeedForward(
            gate_up=load_linear(weights, names, config.hidden, bias=True, norm=norm, eps=config.norm_eps),
            down=load_linear(weights, [(f"{at}.mlp.down_proj", config.hidden)], config.ffn, bias=True),
            activation=config.parts.activation,
            scaling=OutputScaling.load(config, weights, weights.comm),
        )

    def __call__(
        self, x: Tensor, unpacker: ops.WeightUnpacker | None = None, exchange: RowExchange | None = None
    ) -> Tensor:
        inputs = x if exchange is None else exchange.gather(x)
        gate, up = ops.linear(inputs, self.gate_up, unpacker=unpacker).chunk(2, dim=1)
        active = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return add_output(active * up, self.down, x, self.scaling, unpacker, exchange)


def _norm_name(config: ModelConfig, at: str) -> str | None:
    """Return the name of the norm of the network's inputs; None: they are not normed, or not by this network."""
    match config.parts.norms:
        case "pre":
            return f"{at}.post_attention_layernorm.weight"
        case "both":
            return f"{at}.pre_feedforward_layernorm.weight"
        case _:
            return None
