"""jit: declares a Triton kernel.

A kernel calls `pdl_trigger_and_wait` before it reads the results of earlier kernels. On a GPU without programmatic
dependent launch (PDL), before compute capability 9.0, kernels are launched and compiled without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.language.target_info import cuda_capability_geq
from triton.runtime import JITFunction, driver
from triton.runtime.errors import OutOfResources

from emberline.core.cpus import core_count

MIN_LARGE_SHARED_BYTES = 160 << 10
MIN_PDL_ARCHITECTURE = MIN_BULK_ARCHITECTURE = 90  # compute capability 9.0


def _parse_one_at_a_time(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the method with a lock. Python up to 3.12 may raise a SystemError if two threads make syntax trees."""
    lock = threading.Lock()

    def parse_alone(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    return parse_alone


JITFunction.parse = _parse_one_at_a_time(JITFunction.parse)


def jit(function: Callable[..., Any]) -> Any:
    """Return triton.jit(function), typed for mypy. Kernels annotate pointers and numbers as `tensor`."""
    return _fit_to_device(triton.jit(function))


def jit_without_specializing(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `jit` that does not specialize kernels on the values of these parameters."""
    return lambda function: _fit_to_device(triton.jit(function, do_not_specialize=list(names)))


def jit_for_activations(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `jit_without_specializing`, for kernels that write nothing but activations.

    In a block of `compile_in_parallel` they are compiled and not launched: their results are not needed then."""
    return lambda function: _fit_to_device(triton.jit(function, do_not_specialize=list(names)), waits=False)


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Compile the kernels of `jit_for_activations` that this thread launches inside the block in parallel.

    Compilation is complete when the block ends. The compiler releases the GIL."""
    with ThreadPoolExecutor(core_count(), "triton") as pool, triton.AsyncCompileMode(pool):
        _collect_state.is_active = True
        try:
            yield
        finally:
            _collect_state.is_active = False


class _CollectState(threading.local):
    is_active = False  # whether this thread is inside `compile_in_parallel`


_collect_state = _CollectState()


def _fit_to_device(kernel: Any, *, waits: bool = True) -> Any:
    """Return the kernel, changed so that its launches suit the GPU. Results do not change.

    On a GPU without programmatic dependent launch, launches ignore `launch_pdl`. On a GPU with too little shared memory
    for `num_stages`, they use fewer pipeline stages. If `waits` is False, a launch inside `compile_in_parallel` only
    compiles the kernel."""
    run = kernel.run

    def run_with_supported_options(*arguments: Any, launch_pdl: bool = False, **options: Any) -> Any:
        if launch_pdl and driver.active.get_current_target().arch >= MIN_PDL_ARCHITECTURE:
            options["launch_pdl"] = True
        if _collect_state.is_active and not waits:
            options["warmup"] = True
        while True:
            try:
                return run(*arguments, **options)
            except OutOfResources:
                if options.get("num_stages", 1) <= 1:
                    raise
                options["num_stages"] -= 1

    kernel.run = run_with_supported_options
    return kernel


def has_small_shared_memory(device: torch.device) -> bool:
    """Return whether a program may use less than MIN_LARGE_SHARED_BYTES, as for compute capability 8.6, 8.9 and 12.0.

    It is False for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return False
    gpu = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return bool(gpu["max_shared_mem"] < MIN_LARGE_SHARED_BYTES)


def has_bulk_copies() -> bool:
    """Return whether the current GPU copies tiles to shared memory by descriptors (TMA)."""
    return bool(driver.active.get_current_target().arch >= MIN_BULK_ARCHITECTURE)


@jit
def pdl_trigger_and_wait(PDL: constexpr) -> None:
    """With PDL (programmatic dependent launch), let the next kernel start and wait for the previous one."""
    pdl_trigger(PDL)
    pdl_wait(PDL)


@jit
def pdl_trigger(PDL: constexpr) -> None:
    if PDL and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@jit
def pdl_wait(PDL: constexpr) -> None:
    if PDL and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(addresses: tensor, size: tensor) -> None:
    """Fetch `size` bytes at each of these addresses to the L2, with compute capability 9.0 or later.

    Addresses and size must be multiples of 16. A prefetch of a single line would fetch only a sector of it."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [addresses, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def pdl_wait_and_trigger(PDL: constexpr) -> None:
    """With PDL, wait for the previous kernel, then let the next kernel start.

    Before the next kernel waits itself, it may already read the results of kernels before this one.
    """
    if PDL and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


class LaunchShape(NamedTuple):
    """How an attention kernel is launched."""

    rows: int  # queries of a program, or pairs (query, head)
    span: int  # keys that a program loads at a time
    warps: int
    stages: int  # of the pipeline of loads
