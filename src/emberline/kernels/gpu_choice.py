"""select_gpu_kernels: chooses the kernels that this process uses on its GPU, Hopper's or the portable ones."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from emberline.core.gpu_kernels import Capability, GPUKernels, choose_gpu_kernels

_selected: GPUKernels | None = None


class VisibleGPU(NamedTuple):
    """The current GPU of this process, and the kernels for it."""

    name: str
    capability: Capability
    kernels: GPUKernels


def describe_gpu(requested: str = "auto") -> VisibleGPU | None:
    """Return the GPU and the kernels for it, or None if torch sees no GPU. `requested`: one of KERNEL_CHOICES.

    Raises InvalidRequest if the GPU cannot run the requested kernels."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    kernels = choose_gpu_kernels(capability, requested)
    if kernels.is_usable and importlib.util.find_spec("triton") is None:
        kernels = GPUKernels("", "the package triton is not installed")
    return VisibleGPU(torch.cuda.get_device_name(), capability, kernels)


def select_gpu_kernels(kernels: GPUKernels) -> None:
    """Use these kernels for all GPUs of this process from now on."""
    global _selected
    _selected = kernels


def selected_gpu_kernels() -> GPUKernels:
    """Return the kernels that this process uses on its GPU; the first call selects them if nothing else did."""
    global _selected
    if _selected is None:
        gpu = describe_gpu()
        assert gpu is not None, "there is no GPU"
        _selected = gpu.kernels
    return _selected


def name_kernels(device: torch.device) -> str:
    """Return the name of the kernels that compute on a device; empty for a CPU."""
    return selected_gpu_kernels().name if device.type == "cuda" else ""


def has_hopper_kernels() -> bool:
    return selected_gpu_kernels().name == "hopper"
