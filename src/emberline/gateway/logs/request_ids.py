"""RequestIDGenerator: creates unique request ids, which are also the ids of log records.

An id has 48 bits of time, 40 random bits of the process and a 40-bit counter. Random bits for each request would need a
system call, which takes longer than all other steps of creating an id.
"""

from __future__ import annotations

import itertools
import os


class RequestIDGenerator:
    def __init__(self) -> None:
        self._process = os.urandom(5).hex()
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)))  # random, in case two processes share bits

    def next_id(self, time_ms: int) -> str:
        """Return a new id. `time_ms`: milliseconds since 1970."""
        return f"{time_ms:012x}{self._process}{next(self._numbers) & 0xFFFFFFFFFF:010x}"


def parse_created_seconds(request_id: str) -> int:
    """Return the arrival time contained in a request id, in seconds since 1970."""
    return int(request_id[:12], 16) // 1000
