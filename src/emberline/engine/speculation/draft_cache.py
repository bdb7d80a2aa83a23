"""make_draft_cache: the KV cache of a draft model."""

from __future__ import annotations

from dataclasses import replace

from emberline.kv.cache import KVCache
from emberline.models.draft_model import DraftModel


def make_draft_cache(model: DraftModel, target: KVCache, device: str = "cpu") -> KVCache:
    """Return a KV cache for a draft model with the blocks of the target model's cache."""
    c, shape = model.config, target.shape
    return KVCache(replace(shape, layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim), target.num_blocks, device)
