"""check_available_memory: whether a model's weights fit into the memory that this machine has left."""

from __future__ import annotations

from pathlib import Path

from emberline.core.errors import ModelError
from emberline.hub.checkpoint import Checkpoint

MEMINFO = Path("/proc/meminfo")
OTHER_BYTES = 1 << 30  # of an engine process, beside its weights


class NotEnoughMemory(ModelError):
    status = 507
    code = "not_enough_memory"


def check_available_memory(name: str, directory: Path) -> None:
    """Raise NotEnoughMemory if loading the model would exhaust the machine's memory, which could end any process.

    Nothing is checked where the system does not report its memory."""
    available = read_available_bytes()
    needed = sum(tensor.nbytes for tensor in Checkpoint.open(directory).tensors.values()) + OTHER_BYTES
    if available is not None and needed > available:
        raise NotEnoughMemory(
            f"model {name} needs about {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are available",
            param="model",
            hint="unload another model, or load a smaller one: emberline list --all shows sizes",
        )


def read_available_bytes() -> int | None:
    """Return the memory that new processes can use without swapping; None if the system does not report it."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None
