"""HostBlockCopier: copies blocks between the tensors of a CPU cache and host buffers.

A buffer holds the keys of all layers, then the values. Of the tier modules, only this one imports torch. It copies with
numpy, which was faster than torch for these copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.core.plan import BlockCopy
from emberline.kv.cache import KVCache


class HostBlockCopier:
    def __init__(self, cache: KVCache) -> None:
        self._shape = cache.shape
        halves = (half.view(torch.uint8).flatten(2) for half in (cache.keys, cache.values))
        self._halves: list[NDArray[np.uint8]] = [half.numpy() for half in halves]  # [layer, block, byte]

    def save(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for half, buffer in zip(self._halves, self._view_buffer_as_array(copy.buffer), strict=True):
                buffer[:] = half[:, copy.block]

    def load(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for half, buffer in zip(self._halves, self._view_buffer_as_array(copy.buffer), strict=True):
                half[:, copy.block] = buffer

    def _view_buffer_as_array(self, buffer: memoryview) -> NDArray[np.uint8]:
        return np.frombuffer(buffer, np.uint8, self._shape.block_bytes).reshape(2, self._shape.layers, -1)
