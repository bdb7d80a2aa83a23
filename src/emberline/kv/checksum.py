"""CRC-32 of blocks on a disk and on the wire: native where the library could be built, zlib's otherwise."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable

import numpy as np

Crc = Callable[[memoryview, int], int]  # of what came before, continued


def chained(crc: Crc, views: Iterable[memoryview]) -> int:
    before = 0
    for view in views:
        before = crc(view, before)
    return before


def crc_of(library: ctypes.CDLL | None) -> Crc:
    if library is None:
        return zlib.crc32

    def crc(view: memoryview, before: int) -> int:
        if view.readonly or not view:
            address = np.frombuffer(view, np.uint8).ctypes.data
        else:  # a third of the time, which counts where views are many
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return int(library.ember_crc32(address, len(view), before))

    return crc
