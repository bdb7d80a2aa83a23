"""Shard: the part of a model that one device holds under tensor parallelism. Torch-free.

Heads, the inner width of the feed-forward network and the vocabulary are divided among devices. Matrices whose outputs
these are (q, k, v, gate, up, embedding, head) are divided by rows, and their products are concatenated; matrices that
consume them (o, down) are divided by columns, and their products are summed. Norms are replicated. Weights are packed
after they are divided, so each part has its own exponent bases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.models.config import ModelConfig

BY_ROWS, BY_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj", "down_proj"}
VOCABULARY = {"embed_tokens", "lm_head"}
GRAIN = 64  # the vocabulary is divided at multiples of this, as packed weights require; the last part may be smaller


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise InvalidRequest(f"shard rank is {self.rank}; it must be from 0 to {self.of - 1}")

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the config of this part as a model of its own.

        Raises UnsupportedModel if it cannot be divided.
        """
        for what, count in (("attention heads", whole.heads), ("key heads", whole.kv_heads), ("ffn", whole.ffn)):
            if count % self.of:
                raise UnsupportedModel(f"{count} {what} cannot be divided into {self.of} equal parts")
        if self.of > 1 and whole.experts is not None:
            raise UnsupportedModel("a mixture of experts cannot be divided among devices yet")
        if self.of > 1 and (whole.o_bias or whole.mlp_bias):
            raise UnsupportedModel("biases of the o and down projections cannot be divided among devices")
        vocabulary = range(whole.vocab)[self._vocabulary(whole.vocab)]
        if not vocabulary:
            raise UnsupportedModel(f"a vocabulary of {whole.vocab} cannot be divided into {self.of} parts")
        heads, kv_heads, ffn = whole.heads // self.of, whole.kv_heads // self.of, whole.ffn // self.of
        return replace(whole, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=len(vocabulary))

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of a checkpoint tensor that this shard holds."""
        kind, everything = name.split(".")[-2:][0], (slice(None),) * len(shape)
        if self.of == 1 or not shape:
            return everything
        if kind in VOCABULARY:
            return self._vocabulary(shape[0]), *everything[1:]
        if kind in BY_ROWS:
            return self._equal(shape[0]), *everything[1:]
        by_columns = kind in BY_COLUMNS and len(shape) > 1
        return (*everything[:-1], self._equal(shape[-1])) if by_columns else everything

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(len(range(size)[part]) for size, part in zip(shape, self.cut(name, shape), strict=True))

    def _equal(self, size: int) -> slice:
        return slice(size * self.rank // self.of, size * (self.rank + 1) // self.of)

    def _vocabulary(self, size: int) -> slice:
        part = -(-size // (GRAIN * self.of)) * GRAIN
        return slice(min(size, part * self.rank), min(size, part * (self.rank + 1)))
