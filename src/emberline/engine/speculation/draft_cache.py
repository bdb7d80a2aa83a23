"""The KV cache of a draft model, and its share of the memory for KV blocks."""

from __future__ import annotations

import torch

from emberline.engine.kv_shape import make_kv_shape
from emberline.kv.cache import KVCache
from emberline.models.config import ModelConfig
from emberline.models.draft_model import DraftModel


def make_draft_cache(model: DraftModel, target: KVCache, device: str = "cpu") -> KVCache:
    """Return a KV cache for a draft model with the blocks of the target model's cache."""
    shape = make_kv_shape(model.config, target.shape.block_size, target.shape.dtype)
    return KVCache(shape, target.num_blocks, device)


def share_cache_memory(memory_bytes: int, target: ModelConfig, draft: DraftModel | None) -> int:
    """Return the bytes of `memory_bytes` that the target model's KV cache gets; a draft model's cache gets the rest."""
    if draft is None:
        return memory_bytes
    sizes = [make_kv_shape(config, 1, torch.uint8).block_bytes for config in (target, draft.config)]
    return memory_bytes * sizes[0] // sum(sizes)
