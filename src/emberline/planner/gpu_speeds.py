"""GPUSpeed: how fast a GPU reads memory and multiplies, measured or projected."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.engine.gpu_set import GPUSet


@dataclass(frozen=True, slots=True)
class GPUSpeed:
    name: str
    memory_bytes: int
    read_bytes_s: float
    bf16_flops: float
    fp8_flops: float

    def gpus(self, count: int) -> GPUSet:
        return GPUSet(self.name, count, self.memory_bytes)


# Speeds by GPU name: bytes/s of a reduction over 4 GiB, FLOP/s of an 8192^3 product in bf16, and in fp8. The H100's
# bandwidth is the H200's times the ratio of both data sheets (3.35 and 4.8 TB/s); both have the same multiprocessors.
_SPEEDS = {"H200": (4.39e12, 758e12, 1530e12), "H100": (4.39e12 * 3.35 / 4.8, 758e12, 1530e12)}


def find_gpu_speed(text: str) -> GPUSpeed:
    """Return the speed of a GPU by its name. Raises InvalidRequest, which lists the known ones."""
    name = text.strip().upper()
    if name not in _SPEEDS:
        known = " ".join(sorted(each.lower() for each in _SPEEDS))
        raise InvalidRequest(
            f"gpu is {text[:80]!r}, a GPU without measured or projected speeds",
            param="gpu",
            hint=f"known GPUs: {known}; emberline doctor --gpus plans the memory of more",
        )
    return GPUSpeed(name, GPUSet.parse(name).memory_bytes, *_SPEEDS[name])
