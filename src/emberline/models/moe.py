"""SparseFeedForward: a feed-forward network with a mixture of experts, including norm and residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from emberline.core.errors import UnsupportedModel
from emberline.kernels import ops
from emberline.kernels.mixture import Expert, Mixture, Routing
from emberline.models.config import ModelConfig
from emberline.models.layers import load_stacked
from emberline.models.registry import ARCHITECTURES
from emberline.models.weights import Weights


@dataclass(frozen=True, slots=True)
class SparseFeedForward:
    mixture: Mixture

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int) -> SparseFeedForward:
        experts, names = config.experts, ARCHITECTURES[config.model_type].experts
        assert experts is not None and names is not None
        at, hidden = f"model.layers.{layer}.{names.module}", config.hidden
        for fused in (f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"):
            if weights.has_tensor(fused):
                hint = "save it with one matrix for each expert, as save_pretrained of transformers does"
                raise UnsupportedModel(f"tensor {fused!r} holds all experts of a layer in one matrix", hint=hint)

        def load_expert(number: int) -> Expert:
            prefix = f"{at}.experts.{number}"
            halves = [(f"{prefix}.{names.gate}", experts.ffn), (f"{prefix}.{names.up}", experts.ffn)]
            down = [(f"{prefix}.{names.down}", hidden)]
            return Expert(load_stacked(weights, halves, hidden, gated=True), load_stacked(weights, down, experts.ffn))

        return SparseFeedForward(
            Mixture(
                norm=weights.load_vector(f"model.layers.{layer}.post_attention_layernorm.weight", hidden),
                eps=config.norm_eps,
                router=load_stacked(weights, [(f"{at}.gate", experts.count)], hidden),
                experts=tuple(map(load_expert, range(experts.count))),
                routing=Routing(experts.chosen, experts.renormalised),
            )
        )

    def __call__(self, x: Tensor, unpacker: ops.WeightUnpacker | None = None) -> Tensor:
        """Add the network's output to x in place."""
        return ops.run_mixture(x, self.mixture)
