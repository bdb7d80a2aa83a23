"""The process of a rank with a simulated GPU whose memory can be freed, so that its model can really sleep.

`simulate_sleeping_gpus` does the same in the process of the leader."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Environment variable: of ranks, what this file names fails: `free` or `restore`, which are methods of RunnerMemory.
SLEEP_FAILURE_FILE = "EMBERLINE_TEST_SLEEP_FAILURE_FILE"
COMMAND = (sys.executable, str(Path(__file__)))


def use_freeable_caches(set_attribute: Any) -> None:
    """Allocate KV caches and states in memory that can be freed. `set_attribute`: as MonkeyPatch.setattr."""
    import torch

    from emberline.kv import cache

    set_attribute(cache, "_zeroed_tensor", lambda dims, dtype, device: torch.zeros(dims, dtype=dtype))


def simulate_sleeping_gpus(set_attribute: Any) -> None:
    """Let ranks compute on the CPU, as if each had a GPU, with torch's own arithmetic."""
    from host_engine import plain_arithmetic
    from host_rank_process import simulate_gpus

    simulate_gpus(set_attribute)
    use_freeable_caches(set_attribute)
    plain_arithmetic()


@contextmanager
def keeping_arithmetic() -> Iterator[None]:
    """Let an engine on the CPU that starts in this context not change the arithmetic of simulated GPUs."""
    from emberline.kernels import backend

    own = backend._backend
    yield
    backend._backend = own


def fail_on_request(file: Path) -> None:
    """Let a runner's memory not be freed or restored, as if the GPU had no memory, once the file names that."""
    from emberline.engine.gpu.swap import RunnerMemory

    for name in ("free", "restore"):
        setattr(RunnerMemory, name, fail_if_named(file, name, getattr(RunnerMemory, name)))


def fail_if_named(file: Path, name: str, method: Callable[[Any], int]) -> Callable[[Any], int]:
    def run_or_fail(memory: Any) -> int:
        if file.exists() and file.read_text() == name:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return method(memory)

    return run_or_fail


def main() -> int:
    from emberline.engine.ranks import process

    simulate_sleeping_gpus(setattr)
    fail_on_request(Path(os.environ[SLEEP_FAILURE_FILE]))
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
