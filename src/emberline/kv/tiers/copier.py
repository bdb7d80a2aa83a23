"""Copier: moves blocks between a cache's tensors and buffers. In a buffer lie the keys of all layers, then the values.

The only part of the tiers that knows torch. In main memory: numpy's copies are measured to be faster than torch's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.core.plan import Copy
from emberline.kv.cache import KVCache


class Copier:
    def __init__(self, cache: KVCache) -> None:
        self._shape = cache.shape
        halves = (half.view(torch.uint8).flatten(2) for half in (cache.keys, cache.values))
        self._halves: list[NDArray[np.uint8]] = [half.numpy() for half in halves]  # layer, block, byte

    def save(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            for half, buffer in zip(self._halves, self._view(copy.buffer), strict=True):
                buffer[:] = half[:, copy.block]

    def load(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            for half, buffer in zip(self._halves, self._view(copy.buffer), strict=True):
                half[:, copy.block] = buffer

    def _view(self, buffer: memoryview) -> NDArray[np.uint8]:
        return np.frombuffer(buffer, np.uint8, self._shape.block_bytes).reshape(2, self._shape.layers, -1)
