"""jit: how a Triton kernel is declared here; `begin` is what one does first, or right after reading weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, with a type. What a kernel is given as `tensor` is a tensor's address, or a number."""
    return triton.jit(function)


@jit
def begin(PDL: constexpr) -> None:
    """Under programmatic dependent launch: lets the next kernel start, then waits for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
