"""Memory of a device that other processes of the host reach: exported by its owner, opened by them, copied by rows.

The driver exports whole allocations, and torch cuts its own from larger ones: so a tensor is a handle and an offset.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import check, driver

PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: also if it is another device's
HANDLE = 64  # bytes
ANYWHERE = 4  # CU_MEMORYTYPE_UNIFIED: the address says where
MOST_PITCH = (1 << 31) - 1  # bytes between rows that the driver copies at once


class Exported(NamedTuple):
    handle: bytes  # of an allocation
    offset: int  # of a tensor in it


class _Handle(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_ubyte * HANDLE),)


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(
            (f"{side}_{name}", kind)
            for side in ("source", "target")
            for name, kind in (
                ("x", ctypes.c_size_t),
                ("y", ctypes.c_size_t),
                ("type", ctypes.c_uint),
                ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64),
                ("array", ctypes.c_void_p),
                ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def export(tensor: Tensor) -> Exported:
    """DriverError if its memory cannot be shared: some ways to allocate do not allow it."""
    _bind(tensor.device.index)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    at = ctypes.c_uint64(tensor.data_ptr())
    check(driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at))
    check(driver().cuIpcGetMemHandle(ctypes.byref(handle), base))
    return Exported(bytes(handle), tensor.data_ptr() - base.value)


class Opened:
    """Another process's allocation, until it is closed. DriverError if this device cannot reach it."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._index = device.index
        self._address = ctypes.c_uint64()
        _bind(self._index)
        told = _Handle.from_buffer_copy(handle)
        check(driver().cuIpcOpenMemHandle_v2(ctypes.byref(self._address), told, PEER_ACCESS))

    @property
    def address(self) -> int:
        return self._address.value

    def close(self) -> None:
        """While nobody copies from it."""
        _bind(self._index)
        check(driver().cuIpcCloseMemHandle(self._address))


def copy_rows(source: int, source_pitch: int, target: int, target_pitch: int, width: int, height: int) -> None:
    """From address to address, on torch's current stream. Pitch: bytes from row to row."""
    if max(source_pitch, target_pitch) > MOST_PITCH:
        for row in range(height):
            copy_rows(source + row * source_pitch, width, target + row * target_pitch, width, width, 1)
        return
    rows = _Rows(
        source_type=ANYWHERE,
        source_device=source,
        source_pitch=source_pitch,
        target_type=ANYWHERE,
        target_device=target,
        target_pitch=target_pitch,
        width=width,
        height=height,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    check(driver().cuMemcpy2DAsync_v2(ctypes.byref(rows), stream))


def _bind(index: int) -> None:
    """The device's context, for the thread that calls."""
    check(driver().cuCtxSetCurrent(_context(index)))


@cache
def _context(index: int) -> ctypes.c_void_p:
    """That of torch: there is one for all of a process."""
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver().cuDeviceGet(ctypes.byref(device), index))
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context
