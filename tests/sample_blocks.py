"""KV blocks whose content is derived from their hash, so that tests notice a wrong block."""

from __future__ import annotations

import mmap
import random

BLOCK_BYTES = 6000  # not a multiple of a page
BUFFER_BYTES = 8192


def digest(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def buffer() -> memoryview:
    return memoryview(mmap.mmap(-1, BUFFER_BYTES))


def content(name: bytes) -> bytes:
    return random.Random(name).randbytes(BUFFER_BYTES)


def block(name: bytes) -> memoryview:
    made = buffer()
    made[:] = content(name)
    return made
