"""HostBuffers: the buffers of the host tier in the group's memory, where every rank copies its part of KV blocks.

This module does not import torch."""

from __future__ import annotations

import numpy as np

from emberline.engine.ranks.control import BufferArea
from emberline.engine.ranks.group_memory import GroupMemory


class HostBuffers:
    def __init__(self, memory: GroupMemory, area: BufferArea) -> None:
        """Map the buffers. `area`: where they are in the group's memory."""
        self.area = area
        self.memory = memoryview(memory.map(area.offset, area.num_bytes))

    @staticmethod
    def allocate(memory: GroupMemory, buffer_bytes: int, count: int) -> HostBuffers:
        """Add buffers to the group's memory. Only the leader calls this. A page takes up RAM once it is written."""
        return HostBuffers(memory, BufferArea(memory.extend(buffer_bytes * count), buffer_bytes, count))

    def number(self, buffer: memoryview) -> int:
        """Return the number of this buffer, which must be a slice of `memory`."""
        offset, rest = divmod(_address(buffer) - _address(self.memory), self.area.buffer_bytes)
        assert rest == 0 and 0 <= offset < self.area.count
        return offset

    def find(self, number: int) -> memoryview:
        """Return the buffer with this number."""
        size = self.area.buffer_bytes
        return self.memory[number * size : (number + 1) * size]


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
