"""KVCache: the memory of keys and values, one tensor of each for all layers, cut into blocks."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


class KVCache:
    def __init__(self, shape: KVShape, num_blocks: int, device: str = "cpu") -> None:
        dims = (shape.layers, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        self.shape = shape
        self.num_blocks = num_blocks
        self.keys = _zeros(dims, shape.dtype, device)
        self.values = _zeros(dims, shape.dtype, device)


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros, so that masked lanes never meet a stray NaN. In main memory, pages cost nothing until they are written."""
    if device != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(dims) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(dims)
