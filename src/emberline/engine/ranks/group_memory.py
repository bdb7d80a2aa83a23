"""GroupMemory: memory that the ranks of an engine share, for plans, heartbeats and, if needed, KV blocks.

It is anonymous, so it is freed when the processes end, even by kill -9. This module does not import torch.
"""

from __future__ import annotations

import mmap
import os

PLAN_BYTES = 4 << 20  # capacity for plans that some rank has not read yet
WORDS_PER_RANK = 16  # two cache lines, so that ranks do not write to the same one
READ_POSITION, HEARTBEAT, PROGRESS, NUM_COPIED = range(4)  # indexes of a rank's words


class GroupMemory:
    def __init__(self, fd: int, num_ranks: int) -> None:
        """Map the memory of this file descriptor, which the object owns from now on."""
        self.fd, header_bytes = fd, 8 * WORDS_PER_RANK * num_ranks
        # MAP_POPULATE: otherwise the first access to each page takes longer than reading the plan in it.
        self._map = mmap.mmap(fd, header_bytes + PLAN_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = memoryview(self._map)[:header_bytes].cast("Q")
        self.plans = memoryview(self._map)[header_bytes:]

    @staticmethod
    def create(num_ranks: int) -> GroupMemory:
        fd = os.memfd_create("emberline-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, 8 * WORDS_PER_RANK * num_ranks + PLAN_BYTES)
        return GroupMemory(fd, num_ranks)

    def get(self, rank: int, word: int) -> int:
        return self._words[rank * WORDS_PER_RANK + word]

    def set(self, rank: int, word: int, value: int) -> None:
        self._words[rank * WORDS_PER_RANK + word] = value

    def extend(self, num_bytes: int) -> int:
        """Add memory, which is zero, and return its offset. Only the leader calls this."""
        offset = -(-os.fstat(self.fd).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.fd, offset + num_bytes)
        return offset

    def map(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Map and return memory that was added. `offset`: the result of `extend`."""
        return mmap.mmap(self.fd, num_bytes, offset=offset)

    def close(self) -> None:
        """Close the file descriptor. The memory stays mapped until this object is deleted."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
