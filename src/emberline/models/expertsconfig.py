"""ExpertsConfig: the config of a mixture of experts, from config.json.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.models.fields import ConfigFields
from emberline.models.registry import ExpertsSpec

MAX_EXPERTS, MAX_EXPERT_FFN = 1 << 12, 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    count: int
    chosen: int  # experts per token
    ffn: int  # inner width of one expert
    renormalised: bool  # whether the weights of the chosen experts are scaled to sum to 1
    layers: tuple[bool, ...]  # whether each layer has experts; the others are dense

    @staticmethod
    def from_hf(fields: ConfigFields, spec: ExpertsSpec, layers: int) -> ExpertsConfig:
        # transformers 5 writes num_local_experts for every model; earlier releases used names per model.
        count = fields.size(
            "num_experts" if fields.has_field("num_experts") else "num_local_experts", maximum=MAX_EXPERTS
        )
        step, dense = fields.size("decoder_sparse_step", 1, maximum=1 << 30), fields.id_list("mlp_only_layers")
        renormalised = spec.renormalised
        return ExpertsConfig(
            count=count,
            chosen=fields.size("num_experts_per_tok", maximum=count),
            ffn=fields.size(spec.ffn_field, maximum=MAX_EXPERT_FFN),
            renormalised=fields.flag(renormalised, False) if isinstance(renormalised, str) else renormalised,
            layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
        )
