"""GPUSet: a number of equal GPUs, named as in 2xH200.

This module needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.core.gpu_kernels import Capability, choose_gpu_kernels

GIB = 1 << 30
T = 1e12


@dataclass(frozen=True, slots=True)
class GPUModel:
    """A GPU as its data sheet describes it, but for the memory: the CUDA driver reports less than the name says."""

    memory_bytes: int
    capability: Capability | None  # compute capability; None: no NVIDIA GPU, so the engine does not run on it
    read_bytes_s: float
    bf16_flops: float  # dense, with float32 sums
    fp8_flops: float  # bf16_flops if the GPU does not multiply fp8


GPU_MODELS = {
    "A100-40G": GPUModel(int(39.38 * GIB), (8, 0), 1.555 * T, 312 * T, 312 * T),
    "A100": GPUModel(int(79.15 * GIB), (8, 0), 2.039 * T, 312 * T, 312 * T),
    "L40S": GPUModel(int(44.39 * GIB), (8, 9), 0.864 * T, 362 * T, 733 * T),
    "RTX4090": GPUModel(int(23.52 * GIB), (8, 9), 1.008 * T, 165.2 * T, 330.3 * T),
    "RTX5090": GPUModel(int(31.36 * GIB), (12, 0), 1.792 * T, 209.5 * T, 419 * T),
    "H100": GPUModel(int(79.10 * GIB), (9, 0), 3.35 * T, 989 * T, 1979 * T),
    "H200": GPUModel(150_123_642_880, (9, 0), 4.8 * T, 989 * T, 1979 * T),
    "B200": GPUModel(int(178.35 * GIB), (10, 0), 8.0 * T, 2250 * T, 4500 * T),
    "MI300X": GPUModel(int(191.5 * GIB), None, 5.3 * T, 1307 * T, 2615 * T),
}
MAX_GPUS = 1024
_PATTERN = re.compile(r"(?:([1-9][0-9]{0,3})x)?([a-z0-9-]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GPUSet:
    name: str
    count: int
    memory_bytes: int  # of one GPU

    @staticmethod
    def parse(text: str) -> GPUSet:
        """Parse a name such as H200 or 8xH100. Raises InvalidRequest, which lists the known GPUs."""
        match = _PATTERN.fullmatch(text)
        name = match[2].upper() if match else ""
        if match is None or name not in GPU_MODELS or int(match[1] or 1) > MAX_GPUS:
            raise InvalidRequest(
                f"gpus is {text[:80]!r}; it must be a number of GPUs and a known name, such as 2xH200",
                param="gpus",
                hint=f"known GPUs: {' '.join(GPU_MODELS)}; for others use --gpu-memory",
            )
        return GPUSet(name, int(match[1] or 1), GPU_MODELS[name].memory_bytes)

    @property
    def is_supported(self) -> bool:
        """Whether the engine runs on these GPUs. Plans of others are calculations only."""
        return GPU_MODELS[self.name].capability is not None

    @property
    def kernels(self) -> str:
        """The kernels that an engine uses on these GPUs by default."""
        capability = GPU_MODELS[self.name].capability
        return "portable" if capability is None else choose_gpu_kernels(capability).name

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"
