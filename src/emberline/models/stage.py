"""Stage: the part of a model's layers that one device holds under pipeline parallelism.

The first stage also has the embedding, the last one the final norm and the LM head. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from emberline.core.errors import InvalidRequest
from emberline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    index: int
    count: int  # number of stages
    layers: range

    @staticmethod
    def from_config(config: ModelConfig, index: int = 0, count: int = 1, stage_layers: Sequence[int] = ()) -> Stage:
        """Return a stage of a whole model.

        `stage_layers`: the number of layers of each stage; empty: the stages have about equal numbers of weights.
        Raises InvalidRequest if the model has fewer layers than stages, or if the sum of `stage_layers` is not its
        number of layers."""
        if config.layers < count:
            raise InvalidRequest(
                f"pp is {count}, but the model has {config.layers} layers, and each stage needs one",
                param="pp",
                hint=f"set --pp to {config.layers} or less",
            )
        if stage_layers:
            if sum(stage_layers) != config.layers:
                given = ",".join(map(str, stage_layers))
                message = f"pp_layers is {given}, which has {sum(stage_layers)} layers; the model has {config.layers}"
                raise InvalidRequest(message, param="pp_layers", hint=f"choose numbers with the sum {config.layers}")
            begin = sum(stage_layers[:index])
            return Stage(index, count, range(begin, begin + stage_layers[index]))
        return Stage(index, count, split_layers(_layer_costs(config), config.vocab * config.hidden, count)[index])

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def select_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a model with only this stage's layers. It serves to compute the memory of the stage.

        The first of several stages has the embedding, the last the output head, and stages between have neither.
        """
        if self.count == 1:
            return config
        own, experts, attention = slice(self.layers.start, self.layers.stop), config.experts, config.parts.attention
        states = self._renumber(attention.state_layers)
        attention = replace(attention, state=attention.state if states else None, state_layers=states)
        return replace(
            config,
            layers=len(self.layers),
            windows=config.windows[own],
            experts=None if experts is None else replace(experts, layers=experts.layers[own]),
            tie_embeddings=True,
            vocab_rows=config.vocab_rows if self.is_first or self.is_last else 1,
            parts=replace(
                config.parts, attention=attention, unrotated_layers=self._renumber(config.parts.unrotated_layers)
            ),
        )

    def _renumber(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return those of the `layers` that this stage has, numbered from the stage's first layer."""
        return tuple(layer - self.layers.start for layer in layers if layer in self.layers)

    def foreign_tensors(self, config: ModelConfig) -> str:
        """Return a pattern of the names of tensors that only other stages use; empty: there are none."""
        others = [layer for layer in range(config.layers) if layer not in self.layers]
        patterns = [rf"model\.layers\.(?:{'|'.join(map(str, others))})\..*"] if others else []
        patterns += [] if self.is_last else [r"model\.norm\..*", r"lm_head\..*"]
        if not (self.is_first or (self.is_last and config.tie_embeddings)):
            patterns.append(r"model\.embed_tokens\..*")
        return "|".join(patterns)


def split_layers(
    costs: Sequence[float],
    head_cost: float,
    stages: int,
    first_cost: float = 0.0,
    fits: Callable[[range], bool] = lambda layers: True,
) -> list[range]:
    """Split layers with these costs into consecutive stages so that the cost of the most expensive stage is minimal.

    `head_cost`, `first_cost`: costs of the last and the first stage besides their layers. `fits`: whether a stage with
    these layers fits into memory. The result has stages that do not fit only if there is no division without them.
    """
    sums = [0.0, *accumulate(costs)]

    def cost_of(begin: int, end: int, stage: int) -> tuple[bool, float]:
        extra = (head_cost if stage == stages - 1 else 0.0) + (first_cost if stage == 0 else 0.0)
        return not fits(range(begin, end)), sums[end] - sums[begin] + extra

    # best[n]: for the first n layers in the stages so far, the highest cost of a stage, and where each stage begins.
    best: list[tuple[tuple[bool, float], tuple[int, ...]]] = [(cost_of(0, end, 0), (0,)) for end in range(len(sums))]
    for stage in range(1, stages):
        best = [
            min(
                (max(best[begin][0], cost_of(begin, end, stage)), (*best[begin][1], begin))
                for begin in range(stage, max(end, stage + 1))
            )
            for end in range(len(sums))
        ]
    starts = best[-1][1]
    return [range(begin, end) for begin, end in zip(starts, (*starts[1:], len(costs)), strict=True)]


def _layer_costs(config: ModelConfig) -> list[float]:
    """Return about how many weights each layer has: a step of many requests reads all of them from memory."""
    attention = config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    sparse, dense, experts = 0, 3 * config.hidden * config.ffn, config.experts
    if experts is not None:
        sparse = sum(rows * columns for rows, columns in experts.weight_shapes(config.hidden, experts.count)[0])
    is_sparse = (False,) * config.layers if experts is None else experts.layers
    return [float(attention + (sparse if each else dense)) for each in is_sparse]
