"""KVGroup: layers whose keys and values, latents or states are kept in the same way.

Full and latent layers keep every token of a sequence. Layers with a window or with chunks keep the last ones. Recurrent
layers keep a state of fixed size for each sequence.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.models.config_outline import read_outline
from emberline.models.outline import AttentionKind, ModelOutline

KV_DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float8": 1}
STATE_BYTES = 4  # per number: states accumulate over the whole sequence, so they are float32


@dataclass(frozen=True, slots=True)
class KVGroup:
    kind: AttentionKind
    layers: tuple[int, ...]
    kv_heads: int  # 1 for latents, which all heads share
    dtype: str
    block_size: int  # tokens of a block
    bytes_per_token: int  # in all layers of the group; 0 for states
    span: int = 0  # tokens of the window or chunk; 0 for other kinds
    bytes_per_sequence: int = 0  # of states, in all layers of the group; 0 for other kinds

    @property
    def is_bounded(self) -> bool:
        """Whether the memory of a sequence has a limit, however long the sequence is."""
        return self.kind in ("window", "chunk", "state")

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that a sequence keeps between steps; None: all of them. 0 for states.

        A sequence keeps the blocks of its window or chunk, and the block that is being filled."""
        if self.kind == "state":
            return 0
        return (-(-self.span // self.block_size) + 1) * self.block_size if self.span else None

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a sequence of this many tokens keeps, in whole blocks."""
        blocks = -(-num_tokens // self.block_size) * self.block_size
        kept = blocks if self.max_tokens is None else min(blocks, self.max_tokens)
        return self.bytes_per_sequence + kept * self.bytes_per_token


def read_kv_groups(config: Mapping[str, Any], kv_dtype: str = "bfloat16", block_size: int = 64) -> tuple[KVGroup, ...]:
    """Return the groups of a config.json's layers, in the order of their first layers.

    Raises UnsupportedModel for a model that cannot be planned, ModelFileError for a field with a wrong value."""
    return group_layers(read_outline(config), kv_dtype, block_size)


def group_layers(outline: ModelOutline, kv_dtype: str, block_size: int) -> tuple[KVGroup, ...]:
    """Return the groups of a model's layers. Raises ModelFileError if a chunk is not a multiple of a block."""
    if kv_dtype not in KV_DTYPE_BYTES:
        raise InvalidRequest(
            f"kv_dtype is {kv_dtype!r}; it must be one of {', '.join(KV_DTYPE_BYTES)}", param="kv_dtype"
        )
    members: dict[tuple[AttentionKind, int], list[int]] = {}
    for index, layer in enumerate(outline.layers):
        members.setdefault((layer.attention, layer.span), []).append(index)
    return tuple(
        _make_group(outline, kind, span, tuple(layers), kv_dtype, block_size)
        for (kind, span), layers in members.items()
    )


def _make_group(
    outline: ModelOutline, kind: AttentionKind, span: int, layers: tuple[int, ...], kv_dtype: str, block_size: int
) -> KVGroup:
    if kind == "chunk" and span % block_size:
        raise ModelFileError(
            f"config.json: attention_chunk_size is {span}, which blocks of {block_size} tokens do not divide evenly",
            hint="on a GPU, --block-size is 16, 32 or 64",
        )
    width = KV_DTYPE_BYTES[kv_dtype]
    if kind == "state":
        assert outline.state is not None
        size = STATE_BYTES * (outline.state.matrix_values + outline.state.conv_values)
        heads = outline.state.value_heads
        return KVGroup(kind, layers, heads, kv_dtype, block_size, 0, bytes_per_sequence=size * len(layers))
    if kind == "latent":
        assert outline.latent is not None
        values, heads = outline.latent.cached_dim, 1
    else:
        values, heads = 2 * outline.kv_heads * outline.head_dim, outline.kv_heads
    return KVGroup(kind, layers, heads, kv_dtype, block_size, values * width * len(layers), span)
