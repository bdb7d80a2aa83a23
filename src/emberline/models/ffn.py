"""FeedForward: the gated feed-forward network, including norm and residual.

`moe.py` has mixtures of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.layers import load_linear, load_stacked
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate_up: ops.LinearLayer
    down: ops.LinearLayer

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int) -> FeedForward:
        return FeedForward.load_from(config, weights, f"model.layers.{layer}")

    @staticmethod
    def load_from(config: ModelConfig, weights: Weights, at: str) -> FeedForward:
        """Load the network of a layer. `at`: how the names of the layer's tensors begin."""
        names = [(f"{at}.mlp.gate_proj", config.ffn), (f"{at}.mlp.up_proj", config.ffn)]
        return FeedForward(
            gate_up=ops.LinearLayer(
                load_stacked(weights, names, config.hidden, gated=True),
                norm=weights.load_vector(f"{at}.post_attention_layernorm.weight", config.hidden),
                eps=config.norm_eps,
            ),
            down=load_linear(weights, [(f"{at}.mlp.down_proj", config.hidden)], config.ffn),
        )

    def __call__(self, x: Tensor, unpacker: ops.WeightUnpacker | None = None) -> Tensor:
        """Add the network's output to x in place."""
        inner = ops.gate_up_silu(x, self.gate_up, unpacker=unpacker)
        return ops.linear(inner, self.down, add_to=x, unpacker=unpacker)


@dataclass(frozen=True, slots=True)
class BiasedFeedForward:
    """A gated feed-forward network with biases, computed by general ops because few models have biases."""

    gate_up: ops.LinearLayer
    down: ops.LinearLayer

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int) -> BiasedFeedForward:
        at = f"model.layers.{layer}"
        names = [(f"{at}.mlp.gate_proj", config.ffn), (f"{at}.mlp.up_proj", config.ffn)]
        norm = f"{at}.post_attention_layernorm"
        return BiasedFeedForward(
            gate_up=load_linear(weights, names, config.hidden, bias=True, norm=norm, eps=config.norm_eps),
            down=load_linear(weights, [(f"{at}.mlp.down_proj", config.hidden)], config.ffn, bias=True),
        )

    def __call__(self, x: Tensor, unpacker: ops.WeightUnpacker | None = None) -> Tensor:
        gate, up = ops.linear(x, self.gate_up, unpacker=unpacker).chunk(2, dim=1)
        return ops.linear(F.silu(gate) * up, self.down, add_to=x, unpacker=unpacker)
