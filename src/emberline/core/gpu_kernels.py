"""choose_gpu_kernels: which kernels an engine uses on a GPU, by the GPU's compute capability, and why."""

from __future__ import annotations

import os
from typing import NamedTuple

from emberline.core.errors import InvalidRequest

KERNEL_CHOICES = ("auto", "hopper", "portable")
# Environment variable with the kernels of engines whose settings say auto. Tests use it to run on the portable ones.
KERNELS_VARIABLE = "EMBERLINE_KERNELS"
MIN_CAPABILITY, HOPPER_CAPABILITY = (8, 0), (9, 0)

Capability = tuple[int, int]


class GPUKernels(NamedTuple):
    """The kernels for a GPU, and the reason of the choice."""

    name: str  # hopper or portable; empty: the GPU cannot be used
    reason: str

    @property
    def is_usable(self) -> bool:
        return self.name != ""


def choose_gpu_kernels(capability: Capability, requested: str = "auto") -> GPUKernels:
    """Return the kernels for a GPU of this compute capability. `requested`: one of KERNEL_CHOICES.

    Raises InvalidRequest if the GPU cannot run the requested kernels."""
    setting = "kernels"
    if requested == "auto":
        requested, setting = os.environ.get(KERNELS_VARIABLE) or "auto", KERNELS_VARIABLE
    if requested not in KERNEL_CHOICES:
        message = f"{setting} is {requested!r}; it must be one of {', '.join(KERNEL_CHOICES)}"
        raise InvalidRequest(message, param="kernels")
    found, version = _kernels_for(capability), format_capability(capability)
    if requested == "auto" or not found.is_usable:
        return found
    if requested == "hopper" and capability != HOPPER_CAPABILITY:
        message = f"{setting} is hopper, but the GPU has compute capability {version}, and these kernels need 9.0"
        raise InvalidRequest(message, param="kernels", hint="use --kernels auto")
    return GPUKernels(requested, f"{setting} is {requested}")


def _kernels_for(capability: Capability) -> GPUKernels:
    version = format_capability(capability)
    if capability < MIN_CAPABILITY:
        return GPUKernels("", f"compute capability {version} is below {format_capability(MIN_CAPABILITY)}")
    if capability == HOPPER_CAPABILITY:
        return GPUKernels("hopper", f"compute capability {version}")
    return GPUKernels("portable", f"compute capability {version}; the Hopper kernels need 9.0")


def format_capability(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
