"""The KV cache of a draft model, and its share of the memory for KV blocks."""

from __future__ import annotations

import torch

from emberline.engine.kv_shape import make_kv_shape
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig
from emberline.models.draft_model import DraftModel


def make_draft_cache(model: DraftModel, target: KVCache, device: str = "cpu") -> KVCache:
    """Return a KV cache for a draft model, with the same numbers of blocks and tokens as the target model's cache.

    If the target model has several block tables for a request, the draft model uses the first, which covers all tokens.
    Its cache does not use the blocks that are in other tables."""
    shape = make_kv_shape(model.config, target.shape.block_size, target.shape.dtype)
    return KVCache(shape, target.num_blocks, device)


def draft_block_bytes(model: DraftModel, target: KVShape) -> int:
    """Return the bytes of a block of the draft model's cache. `target`: the shape of the target model's cache."""
    return make_kv_shape(model.config, target.block_size, target.dtype).block_bytes


def share_cache_memory(memory_bytes: int, target: ModelConfig, draft: DraftModel | None, groups: LayerGroups) -> int:
    """Return the bytes of `memory_bytes` that the target model's KV cache gets; a draft model's cache gets the rest.

    `groups`: layers of the target model that share block tables."""
    if draft is None:
        return memory_bytes
    shapes = make_kv_shape(target, 1, torch.uint8, groups), make_kv_shape(draft.config, 1, torch.uint8)
    sizes = [shape.block_bytes for shape in shapes]
    return memory_bytes * sizes[0] // sum(sizes)
