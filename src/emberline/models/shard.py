"""Shard: the part of a model that one device holds under tensor parallelism.

Heads, the inner width of the feed-forward network and the vocabulary are divided among devices. The matrices q, k, v,
gate, up, embedding and LM head are divided by rows, and their products are concatenated. The matrices o and down are
divided by columns, and their products are summed. Norms are replicated. Weights are divided before they are compressed,
so each device compresses its own part.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.models.config import ModelConfig
from emberline.models.parts import LLAMA_PARTS

ROW_SHARDED, COLUMN_SHARDED = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj", "down_proj"}
VOCABULARY_SHARDED = {"embed_tokens", "lm_head"}
VOCABULARY_ALIGN_ROWS = (
    64  # the vocabulary is divided at multiples of this, as packed weights require; the last part may be smaller
)


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidRequest(f"shard rank must be from 0 to {self.world_size - 1}, not {self.rank}")

    def shard_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of this shard, as if it were a model of its own.

        Raises UnsupportedModel if the model cannot be divided.
        """
        for what, count in (("attention heads", config.heads), ("key heads", config.kv_heads), ("ffn", config.ffn)):
            if count % self.world_size:
                raise UnsupportedModel(f"{count} {what} cannot be divided into {self.world_size} equal parts")
        if self.world_size > 1 and config.parts != LLAMA_PARTS:
            raise UnsupportedModel(f"a {config.model_type} model cannot be divided among devices yet")
        if self.world_size > 1 and config.experts is not None:
            raise UnsupportedModel("a mixture of experts cannot be divided among devices yet")
        if self.world_size > 1 and (config.o_bias or config.mlp_bias):
            raise UnsupportedModel("biases of the o and down projections cannot be divided among devices")
        vocabulary = range(config.vocab)[self._vocabulary_slice(config.vocab)]
        if not vocabulary:
            raise UnsupportedModel(f"a vocabulary of {config.vocab} cannot be divided into {self.world_size} parts")
        heads, kv_heads, ffn = (
            config.heads // self.world_size,
            config.kv_heads // self.world_size,
            config.ffn // self.world_size,
        )
        return replace(config, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=len(vocabulary))

    def tensor_slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return, for each dimension of a checkpoint tensor, the slice that this shard holds."""
        kind, everything = name.split(".")[-2:][0], (slice(None),) * len(shape)
        if self.world_size == 1 or not shape:
            return everything
        if kind in VOCABULARY_SHARDED:
            return self._vocabulary_slice(shape[0]), *everything[1:]
        if kind in ROW_SHARDED:
            return self._equal_slice(shape[0]), *everything[1:]
        by_columns = kind in COLUMN_SHARDED and len(shape) > 1
        return (*everything[:-1], self._equal_slice(shape[-1])) if by_columns else everything

    def shard_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(len(range(size)[part]) for size, part in zip(shape, self.tensor_slices(name, shape), strict=True))

    def _equal_slice(self, size: int) -> slice:
        return slice(size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size)

    def _vocabulary_slice(self, size: int) -> slice:
        part = -(-size // (VOCABULARY_ALIGN_ROWS * self.world_size)) * VOCABULARY_ALIGN_ROWS
        return slice(min(size, part * self.rank), min(size, part * (self.rank + 1)))
