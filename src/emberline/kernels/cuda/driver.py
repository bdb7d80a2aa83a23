"""Module: compiled kernels on the current device, and how they are launched. ctypes over the driver, nothing between.

A launch goes to torch's current stream, so it is captured into a graph like any of torch's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from emberline.kernels.cuda import nvrtc

PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
TENSOR_TYPES = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.int32: 4, torch.float32: 7, torch.bfloat16: 9}


class DriverError(Exception):
    """The driver refused; it says why."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """A tensor as the copy engine sees it; passed by value to a `const __grid_constant__ TensorMap` parameter."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)

    @staticmethod
    def blank() -> TensorMap:
        memory = bytearray(192)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return TensorMap.from_buffer(memory, -at % 64)  # the driver wants it aligned


Argument = Tensor | int | float | TensorMap | ctypes.Structure | None


class _Collecting(threading.local):
    on_module: Callable[[Module], None] | None = None  # while this thread collects


_collecting = _Collecting()


class Kernel:
    """A kernel that is compiled and loaded when it is first launched."""

    def __init__(self, module: Module, name: str, shared: int) -> None:
        self._module, self._name = module, name
        self._function: ctypes.c_void_p | None = None
        self._shared = shared

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        pdl: bool = False,
        cluster: int = 1,
        shared: int | None = None,
    ) -> None:
        """Python ints pass as 32-bit ints, floats as 32-bit floats, tensors as their addresses, None as a null pointer.

        `pdl`: the kernel may start before the one before it in the stream has ended, and waits for it by
        griddepcontrol.wait itself.
        """
        if self._function is None:
            if _collecting.on_module is not None:
                _collecting.on_module(self._module)
                return
            self._function = self._module.load(self._name, self._shared)
        values = [_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attributes = (_Attribute * 2)()
        count = 0
        if pdl:
            attributes[count].id, attributes[count].value[0] = PDL, 1
            count += 1
        if cluster > 1:
            attributes[count].id = CLUSTER
            attributes[count].value[0:3] = cluster, 1, 1
            count += 1
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(grid, (threads, 1, 1), self._shared if shared is None else shared, stream, attributes, count)
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


class Module:
    """One source file compiled and loaded. `kernels` are names or template instances, as in `nvrtc.compile`."""

    def __init__(self, file: str, kernels: Sequence[str]) -> None:
        self._file, self._kernels = file, kernels
        self._binary: nvrtc.Binary | None = None
        self._handle: ctypes.c_void_p | None = None

    def kernel(self, name: str, shared: int = 0) -> Kernel:
        """`shared`: bytes of dynamic shared memory, raised beyond the usual limit where asked."""
        return Kernel(self, name, shared)

    def compile(self) -> nvrtc.Binary:
        """Compile the kernels, or read them from disk; safe from any thread, since no device is needed."""
        if self._binary is None:
            self._binary = nvrtc.compiled(self._file, self._kernels)
        return self._binary

    def load(self, name: str, shared: int) -> ctypes.c_void_p:
        binary = self.compile()
        if self._handle is None:
            torch.cuda.current_stream()  # makes the device's context current
            handle = ctypes.c_void_p()
            check(driver().cuModuleLoadData(ctypes.byref(handle), binary.code))
            self._handle = handle
        function = ctypes.c_void_p()
        symbol = binary.symbols[name].encode()
        check(driver().cuModuleGetFunction(ctypes.byref(function), self._handle, symbol))
        if shared > 48 << 10:
            check(driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared))
        # The same split of L1 for all: a multiprocessor must run empty before it changes it.
        check(driver().cuFuncSetAttribute(function, SHARED_CARVEOUT, 100))
        return function


@contextlib.contextmanager
def compiling_together(*more: Module) -> Iterator[None]:
    """Inside, in this thread, kernels that are not loaded yet are not launched but compiled, all at the same time.

    What they would have computed is undefined, so only work whose results are not used may run inside. The compiler
    holds no lock of Python's. At the end all kernels that were met are compiled, and `more`."""
    with ThreadPoolExecutor(os.cpu_count() or 1, "nvrtc") as pool:
        compiled = {module: pool.submit(module.compile) for module in more}

        def submit(module: Module) -> None:
            if module not in compiled:
                compiled[module] = pool.submit(module.compile)

        _collecting.on_module = submit
        try:
            yield
        finally:
            _collecting.on_module = None
        for future in compiled.values():
            future.result()


def tensor_map(tensor: Tensor, box: Sequence[int], *, swizzle: int = 128) -> TensorMap:
    """For copies of `box` elements (one per dimension, in the tensor's own order); the last dimension is contiguous.
    Elements outside the tensor read as zero."""
    dims = tensor.dim()
    assert tensor.stride(-1) == 1 and len(box) == dims
    sizes = (ctypes.c_uint64 * dims)(*reversed(tensor.shape))
    strides = (ctypes.c_uint64 * max(dims - 1, 1))(
        *(tensor.stride(d) * tensor.element_size() for d in reversed(range(dims - 1)))
    )
    steps = (ctypes.c_uint32 * dims)(*([1] * dims))
    boxes = (ctypes.c_uint32 * dims)(*reversed(box))
    made = TensorMap.blank()
    promote_256_bytes = 3
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.byref(made), TENSOR_TYPES[tensor.dtype], dims, ctypes.c_void_p(tensor.data_ptr()), sizes, strides,
            boxes, steps, 0, SWIZZLES[swizzle], promote_256_bytes, 0,
        )
    )  # fmt: skip
    return made


def _c_value(argument: Argument) -> ctypes._CData:
    match argument:
        case Tensor():
            return ctypes.c_void_p(argument.data_ptr())
        case None:
            return ctypes.c_void_p()
        case bool() | int():
            return ctypes.c_int(argument)
        case float():
            return ctypes.c_float(argument)
        case _:
            return argument


def check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(name))
        raise DriverError((name.value or b"unknown error").decode())


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
