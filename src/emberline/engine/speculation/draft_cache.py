"""The KV cache of a draft model, and its share of the memory for KV blocks."""

from __future__ import annotations

from dataclasses import replace

from emberline.kv.cache import KVCache
from emberline.models.config import ModelConfig
from emberline.models.draft_model import DraftModel


def make_draft_cache(model: DraftModel, target: KVCache, device: str = "cpu") -> KVCache:
    """Return a KV cache for a draft model with the blocks of the target model's cache."""
    c, shape = model.config, target.shape
    return KVCache(replace(shape, layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim), target.num_blocks, device)


def share_cache_memory(memory_bytes: int, target: ModelConfig, draft: DraftModel | None) -> int:
    """Return the bytes of `memory_bytes` that the target model's KV cache gets; a draft model's cache gets the rest."""
    if draft is None:
        return memory_bytes
    sizes = [c.layers * c.kv_heads * c.head_dim for c in (target, draft.config)]
    return memory_bytes * sizes[0] // sum(sizes)
