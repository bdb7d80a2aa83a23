"""detect_gpus: the GPUs of this machine for `emberline doctor`, without importing torch or allocating GPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from emberline.core.gpu_kernels import GPUKernels, choose_gpu_kernels, format_capability

CAPABILITY_MAJOR_ATTRIBUTE, CAPABILITY_MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True)
class DetectedGPU:
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    unreachable_gpus: tuple[int, ...] = ()  # indices of GPUs whose memory it cannot read

    @property
    def kernels(self) -> GPUKernels:
        """The kernels that an engine uses on this GPU by default."""
        return choose_gpu_kernels(self.capability)

    def describe(self) -> str:
        """Return the GPU's name, memory and compute capability, the kernels that an engine uses on it, and why."""
        kernels, memory = self.kernels, f"{self.memory_bytes / 2**30:.2f} GiB"
        properties = f"{self.name}, {memory}, compute capability {format_capability(self.capability)}"
        if not kernels.is_usable:
            return f"{properties}: not supported, the CPU is used ({kernels.reason})"
        return f"{properties}: {kernels.name} kernels ({kernels.reason})"


def detect_gpus() -> list[DetectedGPU]:
    """Return the GPUs that the CUDA driver reports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = (_read_properties(driver, index, count.value) for index in range(count.value))
    return [gpu for gpu in found if gpu is not None]


def _read_properties(driver: ctypes.CDLL, index: int, count: int) -> DetectedGPU | None:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    capability = [ctypes.c_int(), ctypes.c_int()]
    error = driver.cuDeviceGet(ctypes.byref(device), index)
    error = error or driver.cuDeviceGetName(name, len(name), device)
    error = error or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    for value, attribute in zip(capability, (CAPABILITY_MAJOR_ATTRIBUTE, CAPABILITY_MINOR_ATTRIBUTE), strict=True):
        error = error or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    if error:
        return None
    properties = name.value.decode(errors="replace"), memory.value, (capability[0].value, capability[1].value)
    return DetectedGPU(*properties, tuple(_gpus_without_peer_access(driver, index, count)))


def _gpus_without_peer_access(driver: ctypes.CDLL, index: int, count: int) -> Iterator[int]:
    can_access = ctypes.c_int()
    for other in range(count):
        if other != index and (driver.cuDeviceCanAccessPeer(ctypes.byref(can_access), index, other) or not can_access):
            yield other
