"""usable_gpus: finds the GPUs that the engine's kernels support, without importing torch."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from emberline.core.environment import visible_gpus
from emberline.core.gpu_kernels import MIN_CAPABILITY

QUERY = ["nvidia-smi", "--query-gpu=index,uuid,compute_cap,memory.free", "--format=csv,noheader,nounits"]
QUERY_TIMEOUT_S = 30.0


class Gpu(NamedTuple):
    name: str  # index, in the form that CUDA_VISIBLE_DEVICES accepts
    free_bytes: int


def usable_gpus() -> list[Gpu]:
    """Return the supported GPUs in CUDA_VISIBLE_DEVICES, in its order; [] if there is no driver."""
    try:
        listing = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in listing.splitlines() if line.count(",") == 3]
    supported = [
        (index, uuid, Gpu(index, int(free) << 20))
        for index, uuid, capability, free in rows
        if _parse_capability(capability) >= MIN_CAPABILITY
    ]
    if (visible := visible_gpus()) is None:
        return [gpu for _, _, gpu in supported]
    by_name = {name: gpu for index, uuid, gpu in supported for name in (index, uuid)}
    return [by_name[name] for name in visible if name in by_name]


def _parse_capability(text: str) -> tuple[int, int]:
    """Return the parts of a compute capability such as 9.0; (0, 0) if the driver reports none."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
