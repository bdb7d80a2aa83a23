"""GPUSet: a number of equal GPUs, named as in 2xH200.

This module needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.core.gpu_kernels import Capability, choose_gpu_kernels

GIB = 1 << 30
# Memory of one GPU as the CUDA driver reports it, which is less than its name says.
GPU_MEMORY_BYTES = {
    "A100-40G": int(39.38 * GIB),
    "A100": int(79.15 * GIB),
    "L40S": int(44.39 * GIB),
    "H100": int(79.10 * GIB),
    "H200": 150_123_642_880,
    "B200": int(178.35 * GIB),
}
GPU_CAPABILITIES: dict[str, Capability] = {
    "A100-40G": (8, 0),
    "A100": (8, 0),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
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
        if match is None or name not in GPU_MEMORY_BYTES or int(match[1] or 1) > MAX_GPUS:
            raise InvalidRequest(
                f"gpus is {text[:80]!r}; it must be a number of GPUs and a known name, such as 2xH200",
                param="gpus",
                hint=f"known GPUs: {' '.join(GPU_MEMORY_BYTES)}; for others use --gpu-memory",
            )
        return GPUSet(name, int(match[1] or 1), GPU_MEMORY_BYTES[name])

    @property
    def kernels(self) -> str:
        """The kernels that an engine uses on these GPUs by default."""
        return choose_gpu_kernels(GPU_CAPABILITIES[self.name]).name

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"
