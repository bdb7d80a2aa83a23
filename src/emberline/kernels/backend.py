"""Chooses the op backends of a process: one for tensors in host memory and one for tensors on a GPU.

As in torch, the native library and its thread pool are global to the process. `start_backend` sets them up; if it was
not called, the first op sets them up with defaults. A forked child has no pool threads, so worker processes must be
started by spawn.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from emberline.core.config import kernel_dir
from emberline.core.cpus import core_count
from emberline.core.gpu_kernels import GPUKernels
from emberline.kernels import gpu_choice
from emberline.kernels.cpu.build import NativeBuildError, build_library
from emberline.kernels.cpu.cpu_backend import CPUBackend
from emberline.kernels.cpu.library import load_library
from emberline.kernels.op_backend import OpBackend
from emberline.kernels.reference import ReferenceBackend

_backend: ReferenceBackend | None = None  # for tensors in host memory; a CPUBackend if native kernels could be built
_gpu_backend: OpBackend | None = None
_progress_marks = 0  # calls of `mark_progress`


def backend_of(tensor: Tensor) -> OpBackend:
    """Return the backend of the device that holds the tensor."""
    if tensor.is_cuda:
        return _gpu_backend or start_gpu_backend()
    return _backend or start_backend()


def start_backend(*, threads: int = 0, cache_dir: Path | None = None, native: bool = True) -> ReferenceBackend:
    """Choose the backend for tensors in host memory, set the number of threads, and return the backend.

    This builds or finds the native library. 0 threads means every core that this process may use.
    """
    global _backend
    try:
        library = load_library(build_library(cache_dir or kernel_dir())) if native else None
        _backend = ReferenceBackend("native kernels disabled") if library is None else CPUBackend(library)
    except (NativeBuildError, OSError) as error:
        _backend = ReferenceBackend(str(error))
    _backend.set_threads(threads or core_count())
    return _backend


def current_backend() -> ReferenceBackend:
    """Return the backend for tensors in host memory; start it with defaults if necessary."""
    return _backend or start_backend()


def start_gpu_backend(kernels: GPUKernels | None = None) -> OpBackend:
    """Choose the backend for tensors on a GPU, and return it. All GPUs of a process use the same backend.

    None: the kernels that suit the GPU."""
    from emberline.kernels.cuda.hopper_backend import HopperBackend  # needs triton, which CPU builds of torch lack
    from emberline.kernels.portable_backend import PortableBackend

    global _gpu_backend
    if kernels is not None:
        gpu_choice.select_gpu_kernels(kernels)
    _gpu_backend = HopperBackend() if gpu_choice.has_hopper_kernels() else PortableBackend()
    return _gpu_backend


def set_threads(threads: int) -> None:
    """Set how many threads an op may use, including the calling thread.

    Results do not depend on the number.
    """
    current_backend().set_threads(threads)


def mark_progress() -> None:
    """Increase `progress_count` by one. Models call this after each layer that runs as separate ops."""
    global _progress_marks
    _progress_marks += 1


def progress_count() -> int:
    """Return a count that grows while this process computes; a watchdog uses it to detect hangs."""
    return _progress_marks + (0 if _backend is None else _backend.progress_count())
