"""CRC-32 of KV blocks on disk and in network transfers, by our native library or, without it, by zlib."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable

import numpy as np

Crc = Callable[[memoryview, int], int]  # (bytes, CRC of the bytes before them) -> CRC of both


def crc_of_views(crc: Crc, views: Iterable[memoryview]) -> int:
    """Return the CRC of the concatenated views."""
    total = 0
    for view in views:
        total = crc(view, total)
    return total


def select_crc(library: ctypes.CDLL | None) -> Crc:
    """Return the native CRC function, or zlib's if `library` is None."""
    if library is None:
        return zlib.crc32

    def crc(view: memoryview, start: int) -> int:
        if view.readonly or not view:
            address = np.frombuffer(view, np.uint8).ctypes.data
        else:  # takes a third of numpy's time, which matters for transfers of many small views
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return int(library.ember_crc32(address, len(view), start))

    return crc
