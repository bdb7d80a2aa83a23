"""Shares device memory between the processes of a host through CUDA IPC handles.

The driver exports whole allocations, and torch places tensors inside larger allocations. So a shared tensor is
described by a handle of its allocation and an offset.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import check_status, driver_library

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: allows memory of another device
HANDLE_BYTES, UUID_BYTES = 64, 16
MEMORY_TYPE_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver infers the memory type from the address
MAX_PITCH_BYTES = (1 << 31) - 1  # the most bytes between rows that one copy by the driver supports


class ExportedMemory(NamedTuple):
    handle: bytes  # IPC handle of an allocation
    offset: int  # bytes from its start to the tensor


class _IPCHandle(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memcpy2D(ctypes.Structure):
    """The C struct CUDA_MEMCPY2D of the driver API."""

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


def export_memory(tensor: Tensor) -> ExportedMemory:
    """Return a handle with which other processes can open the tensor's memory.

    Raises CudaDriverError if memory of torch's allocator cannot be shared.
    """
    _make_context_current(tensor.device.index)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IPCHandle()
    at = ctypes.c_uint64(tensor.data_ptr())
    check_status(driver_library().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at))
    check_status(driver_library().cuIpcGetMemHandle(ctypes.byref(handle), base))
    return ExportedMemory(bytes(handle), tensor.data_ptr() - base.value)


class OpenedMemory:
    """An allocation of a different process, mapped into this process until `close`.

    The constructor raises CudaDriverError if this device cannot access the allocation.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._index = device.index
        self._address = ctypes.c_uint64()
        _make_context_current(self._index)
        ipc_handle = _IPCHandle.from_buffer_copy(handle)
        check_status(driver_library().cuIpcOpenMemHandle_v2(ctypes.byref(self._address), ipc_handle, LAZY_PEER_ACCESS))

    @property
    def address(self) -> int:
        return self._address.value

    def close(self) -> None:
        """Unmap the memory. No copy from it may be in progress."""
        _make_context_current(self._index)
        check_status(driver_library().cuIpcCloseMemHandle(self._address))


class AllocatedMemory:
    """Zeroed device memory outside torch's allocator, which other processes can open, until `close`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._index, self._address = device.index, ctypes.c_uint64()
        _make_context_current(self._index)
        check_status(driver_library().cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(size)))
        check_status(driver_library().cuMemsetD8_v2(self._address, ctypes.c_ubyte(0), ctypes.c_size_t(size)))
        check_status(driver_library().cuCtxSynchronize())

    @property
    def address(self) -> int:
        return self._address.value

    def export(self) -> bytes:
        """Return the handle with which other processes can open the memory."""
        handle = _IPCHandle()
        check_status(driver_library().cuIpcGetMemHandle(ctypes.byref(handle), self._address))
        return bytes(handle)

    def close(self) -> None:
        """Free the memory. No kernel may use it any more."""
        _make_context_current(self._index)
        check_status(driver_library().cuMemFree_v2(self._address))


def get_device_uuid(index: int) -> bytes:
    """Return the UUID of a GPU, which is the same in all processes."""
    uuid = (ctypes.c_ubyte * UUID_BYTES)()
    check_status(driver_library().cuDeviceGetUuid_v2(ctypes.byref(uuid), _get_device(index)))
    return bytes(uuid)


def can_access_peer(index: int, uuid: bytes) -> bool:
    """Return whether a GPU can access the memory of the GPU with this UUID.

    The result is False if that other GPU is not visible to this process."""
    indexes = [other for other in range(torch.cuda.device_count()) if get_device_uuid(other) == uuid]
    if not indexes or indexes[0] == index:
        return bool(indexes)
    is_possible = ctypes.c_int()
    devices = _get_device(index), _get_device(indexes[0])
    check_status(driver_library().cuDeviceCanAccessPeer(ctypes.byref(is_possible), *devices))
    return bool(is_possible.value)


def copy_rows(source: int, source_pitch: int, target: int, target_pitch: int, width: int, height: int) -> None:
    """Copy `height` rows of `width` bytes on torch's current stream.

    A pitch is the bytes from one row to the next.
    """
    if max(source_pitch, target_pitch) > MAX_PITCH_BYTES:
        for row in range(height):
            copy_rows(source + row * source_pitch, width, target + row * target_pitch, width, width, 1)
        return
    rows = _Memcpy2D(
        source_type=MEMORY_TYPE_UNIFIED,
        source_device=source,
        source_pitch=source_pitch,
        target_type=MEMORY_TYPE_UNIFIED,
        target_device=target,
        target_pitch=target_pitch,
        width=width,
        height=height,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    check_status(driver_library().cuMemcpy2DAsync_v2(ctypes.byref(rows), stream))


def _make_context_current(device_index: int) -> None:
    """Make the device's context current in the calling thread."""
    check_status(driver_library().cuCtxSetCurrent(_primary_context(device_index)))


@cache
def _primary_context(device_index: int) -> ctypes.c_void_p:
    """Return the device's primary context, the one that torch uses."""
    torch.cuda.init()
    context = ctypes.c_void_p()
    check_status(driver_library().cuDevicePrimaryCtxRetain(ctypes.byref(context), _get_device(device_index)))
    return context


def _get_device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    check_status(driver_library().cuDeviceGet(ctypes.byref(device), index))
    return device
