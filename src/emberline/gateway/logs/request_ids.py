"""RequestIDGenerator: unique ids of requests, which are also the ids of their log records.

An id has 48 bits of time, 40 random bits of the process and a 40-bit counter. Random bits for each request would need a
system call, which costs more than all the rest of creating an id.
"""

from __future__ import annotations

import itertools
import os


class RequestIDGenerator:
    def __init__(self) -> None:
        self._process = os.urandom(5).hex()
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)))  # a random start, if two processes' bits agree

    def next(self, ms: int) -> str:
        """Return a new id. `ms`: milliseconds since 1970."""
        return f"{ms:012x}{self._process}{next(self._numbers) & 0xFFFFFFFFFF:010x}"


def created_seconds(id: str) -> int:
    """Return when the request arrived, in seconds since 1970."""
    return int(id[:12], 16) // 1000
