"""GPUs of this machine that the engine's kernels are made for, found without importing torch."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from emberline.core.config import visible_gpus

QUERY = ["nvidia-smi", "--query-gpu=index,uuid,compute_cap,memory.free", "--format=csv,noheader,nounits"]
CAPABILITY = "9.0"  # as engine/gpu/device.py asks for
QUERY_TIMEOUT_S = 30.0


class Gpu(NamedTuple):
    name: str  # as CUDA_VISIBLE_DEVICES takes it
    free_bytes: int


def usable_gpus() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; [] where there is no driver."""
    try:
        told = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in told.splitlines() if line.count(",") == 3]
    found = [(index, uuid, Gpu(index, int(free) << 20)) for index, uuid, cap, free in rows if cap == CAPABILITY]
    if (visible := visible_gpus()) is None:
        return [gpu for _, _, gpu in found]
    named = {name: gpu for index, uuid, gpu in found for name in (index, uuid)}
    return [named[name] for name in visible if name in named]
