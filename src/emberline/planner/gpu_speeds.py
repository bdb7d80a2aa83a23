"""GPUSpeed: how fast a GPU reads memory and multiplies, measured or projected."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.engine.gpu_set import GPU_MODELS, GPUSet

# Measured on an H200: bytes/s of a reduction over 4 GiB, FLOP/s of an 8192^3 product in bf16, and in fp8. Other GPUs
# are projected: they reach the same share of what their data sheets say.
MEASURED_GPU = "H200"
_MEASURED = (4.39e12, 758e12, 1530e12)


@dataclass(frozen=True, slots=True)
class GPUSpeed:
    name: str
    memory_bytes: int
    read_bytes_s: float
    bf16_flops: float
    fp8_flops: float

    def gpus(self, count: int) -> GPUSet:
        return GPUSet(self.name, count, self.memory_bytes)

    @property
    def note(self) -> str:
        """What a reader must know of the GPU's figures; empty for a GPU that was measured."""
        if self.name == MEASURED_GPU:
            return ""
        unsupported = "" if self.gpus(1).is_supported else ", and the engine does not run on it"
        return f"The {self.name} was not measured: its speed is computed from its data sheet{unsupported}."


def find_gpu_speed(text: str) -> GPUSpeed:
    """Return the speed of a GPU by its name. Raises InvalidRequest, which lists the known ones."""
    name = text.strip().upper().replace("RTX ", "RTX").replace("RTX-", "RTX")
    if name not in GPU_MODELS:
        known = " ".join(each.lower() for each in GPU_MODELS)
        raise InvalidRequest(f"gpu is {text[:80]!r}, an unknown GPU", param="gpu", hint=f"known GPUs: {known}")
    gpu, reference = GPU_MODELS[name], GPU_MODELS[MEASURED_GPU]
    read, bf16, fp8 = _MEASURED
    return GPUSpeed(
        name,
        gpu.memory_bytes,
        read * gpu.read_bytes_s / reference.read_bytes_s,
        bf16 * gpu.bf16_flops / reference.bf16_flops,
        fp8 * gpu.fp8_flops / reference.fp8_flops,
    )
