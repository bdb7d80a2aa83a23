"""Ids: of calls, in the shape that records have: 48 bits of time, and 80 that no other call has. A system call for each
would cost more than all else about it: 40 of those bits are this process's, by chance, and 40 count."""

from __future__ import annotations

import itertools
import os


class Ids:
    def __init__(self) -> None:
        self._own = os.urandom(5).hex()
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)))  # processes that got equal bits differ here

    def next(self, ms: int) -> str:
        return f"{ms:012x}{self._own}{next(self._numbers) & 0xFFFFFFFFFF:010x}"


def born(id: str) -> int:
    """When a call came, in seconds since 1970."""
    return int(id[:12], 16) // 1000
