"""Backend: the library that computes on a CPU, either the native one or torch, and its state in this process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from emberline.core.config import core_count, kernel_dir
from emberline.kernels.cpu.build import NativeBuildError, build_library
from emberline.kernels.cpu.library import load_library


@dataclass(frozen=True, slots=True)
class Backend:
    library: ctypes.CDLL | None
    isa: str
    reason: str = ""  # why there is no native library; empty if there is one

    def __str__(self) -> str:
        return f"native ({self.isa})" if self.library else f"torch ({self.reason})"


_backend: Backend | None = None
_marks = 0  # calls of `mark_progress`


def start_backend(*, threads: int = 0, cache_dir: Path | None = None, native: bool = True) -> Backend:
    """Build or find the native library, set the number of threads and return the backend.

    0 threads means every core that this process may use.
    """
    global _backend
    try:
        library = load_library(build_library(cache_dir or kernel_dir())) if native else None
        isa = library.ember_isa().decode() if library else ""
        _backend = Backend(library, isa, "" if library else "native kernels disabled")
    except (NativeBuildError, OSError) as error:
        _backend = Backend(None, "", str(error))
    set_threads(threads or core_count())
    return _backend


def current_backend() -> Backend:
    """Return the backend of this process, started with defaults if `start_backend` was not called."""
    return _backend or start_backend()


def set_threads(threads: int) -> None:
    """Set how many cores an op may use, the caller's included. Results do not depend on it."""
    library = current_backend().library
    if library is not None:
        library.ember_set_threads(threads)
    else:
        torch.set_num_threads(threads)


def mark_progress() -> None:
    """Record that part of a forward pass was computed, for ops that no native kernel counts."""
    global _marks
    _marks += 1


def progress_count() -> int:
    """Return a count that grows while this process computes; a watchdog uses it to detect hangs."""
    native = _backend.library.ember_progress() if _backend is not None and _backend.library is not None else 0
    return int(native) + _marks
