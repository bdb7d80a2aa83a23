"""HostBlockCopier: copies blocks between the tensors of a CPU cache and host buffers.

A buffer holds the keys of all layers, then the values if the cache has any of their own. Of the tier modules, only this
one imports torch. It copies with numpy, which was faster than torch for these copies.
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
        parts = (part.view(torch.uint8).flatten(2) for part in cache.parts)
        self._parts: list[NDArray[np.uint8]] = [part.numpy() for part in parts]  # [layer, block, byte]

    def save(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for part, buffer in zip(self._parts, self._view_buffer_as_array(copy.buffer), strict=True):
                buffer[:] = part[:, copy.block]

    def load(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for part, buffer in zip(self._parts, self._view_buffer_as_array(copy.buffer), strict=True):
                part[:, copy.block] = buffer

    def _view_buffer_as_array(self, buffer: memoryview) -> NDArray[np.uint8]:
        shape = self._shape
        return np.frombuffer(buffer, np.uint8, shape.block_bytes).reshape(shape.parts, shape.layers, -1)
