"""ExpertsConfig: what config.json says about a mixture of experts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.models.fields import Fields
from emberline.models.registry import Experts

MOST_EXPERTS, MOST_FFN = 1 << 12, 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    count: int
    chosen: int  # of them, for each token
    ffn: int  # the inner width of one
    renormalised: bool  # whether the shares of those chosen sum up to 1
    layers: tuple[bool, ...]  # which have experts; the others are dense

    @staticmethod
    def from_hf(fields: Fields, rules: Experts, layers: int) -> ExpertsConfig:
        # transformers 5 writes num_local_experts for every model; before, each had a name of its own.
        count = fields.size("num_experts" if fields.has("num_experts") else "num_local_experts", most=MOST_EXPERTS)
        step, dense = fields.size("decoder_sparse_step", 1, most=1 << 30), fields.ids("mlp_only_layers")
        sums = rules.renormalised
        return ExpertsConfig(
            count=count,
            chosen=fields.size("num_experts_per_tok", most=count),
            ffn=fields.size(rules.ffn, most=MOST_FFN),
            renormalised=fields.flag(sums, False) if isinstance(sums, str) else sums,
            layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
        )
