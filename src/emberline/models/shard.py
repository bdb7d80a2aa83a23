"""Shard: the part of a model that one rank holds under tensor parallelism.

Heads, the inner width of feed-forward networks and the vocabulary are divided among ranks. Experts are divided by
width, or whole experts among `expert_parts` groups of ranks. Fewer KV heads than ranks are replicated: each rank has
the one that its query heads need. With data-parallel attention, every rank has all heads, for requests of its own.
`tensor_sharding.py` says which part of each tensor of a checkpoint a rank loads. Weights are divided before they are
compressed, so each rank compresses its own part.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.core.errors import InvalidRequest
from emberline.models.config import ModelConfig
from emberline.models.decoder_parts import DecoderParts
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.outline import divide_evenly, divide_kv_heads, divide_latent, divide_state, divide_vocabulary


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    world_size: int = 1
    expert_parts: int = 1  # groups of ranks among which whole experts are divided; a group divides their width
    divides_attention: bool = True  # False: each rank has all heads, and attends to requests of its own
    redundant_experts: int = 0  # copies of experts that each group of ranks can keep beside its own experts
    gathers_rows: bool = False  # with data-parallel attention: whether ranks compute their experts for all rows
    only_expert: int | None = None  # the only expert to load; None: all of the rank

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidRequest(f"shard rank must be from 0 to {self.world_size - 1}, not {self.rank}")
        if self.expert_parts < 1 or self.world_size % self.expert_parts:
            message = f"{self.world_size} ranks cannot be divided into {self.expert_parts} groups of experts"
            raise InvalidRequest(message, param="ep", hint="set --ep to a divisor of --tp")

    @property
    def is_whole(self) -> bool:
        return self.world_size == 1

    def shard_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the sizes of this rank's part. `vocab` stays that of the whole model.

        Raises UnsupportedModel, whose message names what cannot be divided evenly."""
        if self.is_whole:
            return config
        ranks, experts = self.world_size, config.experts
        has_dense, attending = experts is None or not all(experts.layers), ranks if self.divides_attention else 1
        return replace(
            config,
            heads=divide_evenly(config.heads, attending, "attention heads"),
            kv_heads=divide_kv_heads(config.kv_heads, attending),
            ffn=divide_evenly(config.ffn, ranks, "columns of the feed-forward network") if has_dense else config.ffn,
            experts=None if experts is None else self._shard_experts(experts),
            vocab_rows=len(self.vocabulary(config.vocab)),
            parts=self._shard_parts(config) if self.divides_attention else config.parts,
        )

    def vocabulary(self, size: int) -> range:
        """Return this rank's range of tokens: it has their rows of the embedding and the output head."""
        part = divide_vocabulary(size, self.world_size)
        return range(size)[part * self.rank : part * (self.rank + 1)]

    def experts(self, count: int) -> range:
        """Return the indexes of this rank's experts, of each of which it may have only some columns."""
        if self.only_expert is not None:
            return range(self.only_expert, self.only_expert + 1)
        each = divide_evenly(count, self.expert_parts, "experts")
        first = self.expert_group * each
        return range(first, first + each)

    def expert_columns(self, width: int) -> range:
        """Return this rank's part of the inner width of each of its experts."""
        each = divide_evenly(width, self._expert_ranks, "columns of an expert")
        first = self.rank % self._expert_ranks * each
        return range(first, first + each)

    @property
    def expert_group(self) -> int:
        """The group of ranks to which this rank belongs."""
        return self.rank // self._expert_ranks

    @property
    def dispatches_rows(self) -> bool:
        """Whether each row is sent to the ranks that have its experts, with data-parallel attention."""
        return not self.divides_attention and self.expert_parts > 1 and not self.gathers_rows

    def shared_columns(self, width: int) -> range:
        """Return this rank's part of the inner width of the shared expert: all of it if rows are dispatched."""
        if self.dispatches_rows:
            return range(width)
        divide_evenly(width, self.world_size, "columns of the shared experts")
        return self.divide(width)

    @property
    def has_expert_bias(self) -> bool:
        """Whether this rank adds the output biases of its experts: only the first of the ranks that share them does."""
        return self.rank % self._expert_ranks == 0

    def divide(self, count: int) -> range:
        """Return the indexes of this rank's part of `count` units. With fewer units than ranks, ranks share units."""
        parts = min(count, self.world_size)
        index, each = self.rank * parts // self.world_size, count // parts
        return range(index * each, (index + 1) * each)

    def is_first_of(self, count: int) -> bool:
        """Return whether no earlier rank has the same part of `count` units."""
        return self.rank == 0 or replace(self, rank=self.rank - 1).divide(count) != self.divide(count)

    @property
    def _expert_ranks(self) -> int:
        """The number of ranks that divide the width of the same experts."""
        return self.world_size // self.expert_parts

    def _shard_experts(self, experts: ExpertsConfig) -> ExpertsConfig:
        shared = len(self.shared_columns(experts.options.shared_ffn)) if experts.options.shared_ffn else 0
        return replace(
            experts,
            ffn=len(self.expert_columns(experts.ffn)),
            local_experts=self.experts(experts.count) if self.expert_parts > 1 else None,
            spare=self.redundant_experts if self.gathers_rows else 0,
            options=replace(experts.options, shared_ffn=shared),
        )

    def _shard_parts(self, config: ModelConfig) -> DecoderParts:
        attention, ranks = config.parts.attention, self.world_size
        state, latent = attention.state, attention.latent
        divided = replace(
            attention,
            state=None if state is None else divide_state(state, ranks),
            latent=None if latent is None else divide_latent(latent, ranks, config.weight_row_unit),
        )
        return replace(config.parts, attention=divided)
