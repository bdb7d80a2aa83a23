"""CudaModule and CudaKernel: load and launch compiled kernels through the CUDA driver API.

A launch goes to torch's current stream, so that it is captured into a CUDA graph like torch's own kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import torch
from torch import Tensor

from emberline.core.cpus import core_count
from emberline.core.gpu_kernels import HOPPER_CAPABILITY
from emberline.kernels.cuda import nvrtc

LAUNCH_ATTRIBUTE_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
LAUNCH_ATTRIBUTE_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
FUNCTION_ATTRIBUTE_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FUNCTION_ATTRIBUTE_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
H200_SMS = 132  # multiprocessors of an H100 or H200
SWIZZLE_MODES = {0: 0, 32: 1, 64: 2, 128: 3}
MAX_CACHED_TENSOR_MAPS, MAX_CACHED_LAUNCH_CONFIGS = 8192, 4096
TENSOR_TYPES = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.int32: 4, torch.float32: 7, torch.bfloat16: 9}


class CudaDriverError(Exception):
    """A call of the CUDA driver failed; the message is the driver's."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """A TMA descriptor (CUtensorMap), passed by value to a `const __grid_constant__ TensorMap` parameter."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)

    @staticmethod
    def allocate() -> TensorMap:
        memory = bytearray(192)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return TensorMap.from_buffer(memory, -address % 64)  # the driver requires 64-byte alignment


KernelArgument = Tensor | int | float | TensorMap | ctypes.Structure | None


class _ModuleCollector(threading.local):
    # While this thread collects: called for each module that is not loaded yet.
    on_module: Callable[[CudaModule], None] | None = None


_collect_state = _ModuleCollector()


class CudaKernel:
    """A kernel that is compiled and loaded on its first launch."""

    def __init__(self, module: CudaModule, name: str, shared: int) -> None:
        self._module, self._name = module, name
        self._function: ctypes.c_void_p | None = None
        self._shared = shared

    @property
    def is_loaded(self) -> bool:
        """Whether the kernel is loaded; otherwise a launch inside `compile_in_parallel` does nothing."""
        return self._function is not None

    def load(self) -> CudaKernel:
        """Compile and load the kernel now, also inside `compile_in_parallel`, and return it."""
        if self._function is None:
            self._function = self._module.load_function(self._name, self._shared)
        return self

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[KernelArgument],
        *,
        pdl: bool = False,
        cluster: int = 1,
        shared_bytes: int | None = None,
    ) -> None:
        """Launch the kernel on the current stream.

        Python ints are passed as 32-bit ints, floats as 32-bit floats, tensors as addresses, None as a null pointer.
        `pdl` (programmatic dependent launch): the kernel may start before the preceding kernel in the stream has ended;
        its code waits for that kernel with griddepcontrol.wait. GPUs before compute capability 9.0 ignore it.
        `shared_bytes`: bytes of dynamic shared memory.
        """
        if self._function is None:
            if _collect_state.on_module is not None:
                _collect_state.on_module(self._module)
                return
            self._function = self._module.load_function(self._name, self._shared)
        values = [_to_c_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        shared = self._shared if shared_bytes is None else shared_bytes
        config = _make_launch_config(grid, threads, shared, stream, pdl and supports_pdl(), cluster)
        check_status(driver_library().cuLaunchKernelEx(config, self._function, pointers, None))


@lru_cache(MAX_CACHED_LAUNCH_CONFIGS)
def _make_launch_config(
    grid: tuple[int, int, int], threads: int, shared: int, stream: int, pdl: bool, cluster: int
) -> ctypes._Pointer[_LaunchConfig]:
    attributes = (_LaunchAttribute * 2)()
    count = 0
    if pdl:
        attributes[count].id, attributes[count].value[0] = LAUNCH_ATTRIBUTE_PDL, 1
        count += 1
    if cluster > 1:
        attributes[count].id = LAUNCH_ATTRIBUTE_CLUSTER
        attributes[count].value[0:3] = cluster, 1, 1
        count += 1
    return ctypes.pointer(_LaunchConfig(grid, (threads, 1, 1), shared, stream, attributes, count))


class CudaModule:
    """A source file and the kernels that are compiled from it.

    `kernels` are names of functions or template instances, such as `scale<64>`.
    """

    def __init__(self, file: str, kernels: Sequence[str]) -> None:
        self.file, self.kernels = file, tuple(kernels)
        self._binary: nvrtc.KernelBinary | None = None
        self._handle: ctypes.c_void_p | None = None

    def kernel(self, name: str, shared_bytes: int = 0) -> CudaKernel:
        """Return the kernel. `shared_bytes`: bytes of dynamic shared memory that a launch may use."""
        return CudaKernel(self, name, shared_bytes)

    def compile(self) -> nvrtc.KernelBinary:
        """Compile the kernels, or read them from disk. No GPU is needed, and any thread may call this."""
        if self._binary is None:
            self._binary = nvrtc.compile_cached(self.file, self.kernels, device_options())
        return self._binary

    def load_function(self, name: str, shared_bytes: int) -> ctypes.c_void_p:
        binary = self.compile()
        if self._handle is None:
            torch.cuda.current_stream()  # side effect: makes the device's context current
            handle = ctypes.c_void_p()
            check_status(driver_library().cuModuleLoadData(ctypes.byref(handle), binary.code))
            self._handle = handle
        function = ctypes.c_void_p()
        symbol = binary.symbols[name].encode()
        check_status(driver_library().cuModuleGetFunction(ctypes.byref(function), self._handle, symbol))
        if shared_bytes > 48 << 10:
            check_status(driver_library().cuFuncSetAttribute(function, FUNCTION_ATTRIBUTE_MAX_SHARED, shared_bytes))
        # All kernels use the same split of L1 and shared memory: an SM must be idle before it can change the split.
        check_status(driver_library().cuFuncSetAttribute(function, FUNCTION_ATTRIBUTE_CARVEOUT, 100))
        return function


@contextlib.contextmanager
def compile_in_parallel(*modules: CudaModule) -> Iterator[None]:
    """Compile in parallel all kernels that this thread launches inside the `with` block, and `modules`.

    A launch of a kernel that is not compiled yet does nothing, so run only a warm-up inside the block and discard its
    results. Compilation is complete when the block ends. The compiler releases the GIL.
    """
    with ThreadPoolExecutor(core_count(), "nvrtc") as pool:
        compiled = {module: pool.submit(module.compile) for module in modules}

        def submit(module: CudaModule) -> None:
            if module not in compiled:
                compiled[module] = pool.submit(module.compile)

        _collect_state.on_module = submit
        try:
            yield
        finally:
            _collect_state.on_module = None
        for future in compiled.values():
            future.result()


def make_tensor_map(tensor: Tensor, box: Sequence[int], *, swizzle: int = 128) -> TensorMap:
    """Return the TMA descriptor for copies of `box` elements.

    `box` has one number per dimension of the tensor. The last dimension must be contiguous. Elements outside the tensor
    are read as zero.
    """
    strides = tensor.stride()
    assert strides[-1] == 1 and len(box) == len(strides)
    return _encode_tensor_map(tensor.data_ptr(), tensor.dtype, tensor.shape, strides, tuple(box), swizzle)


# Activations of uncaptured steps are mostly at the same addresses.
@lru_cache(MAX_CACHED_TENSOR_MAPS)
def _encode_tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: torch.Size,
    element_strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    dims = len(shape)
    sizes = (ctypes.c_uint64 * dims)(*reversed(shape))
    strides = (ctypes.c_uint64 * max(dims - 1, 1))(*(s * dtype.itemsize for s in reversed(element_strides[:-1])))
    steps = (ctypes.c_uint32 * dims)(*([1] * dims))
    boxes = (ctypes.c_uint32 * dims)(*reversed(box))
    result = TensorMap.allocate()
    promote_256_bytes = 3
    check_status(
        driver_library().cuTensorMapEncodeTiled(
            ctypes.byref(result), TENSOR_TYPES[dtype], dims, ctypes.c_void_p(address), sizes, strides,
            boxes, steps, 0, SWIZZLE_MODES[swizzle], promote_256_bytes, 0,
        )
    )  # fmt: skip
    return result


def _to_c_value(argument: KernelArgument) -> ctypes._CData:
    match argument:
        case int():  # also bool
            return ctypes.c_int(argument)
        case Tensor():
            return ctypes.c_void_p(argument.data_ptr())
        case None:
            return ctypes.c_void_p()
        case float():
            return ctypes.c_float(argument)
        case _:
            return argument


def check_status(status: int) -> None:
    """Raise CudaDriverError if the status of a driver call is an error."""
    if status:
        name = ctypes.c_char_p()
        driver_library().cuGetErrorString(status, ctypes.byref(name))
        raise CudaDriverError((name.value or b"unknown error").decode())


@cache
def device_options() -> tuple[str, ...]:
    """Return the compiler options for the current GPU, or for Hopper if there is no GPU."""
    if not torch.cuda.is_available():
        return nvrtc.compiler_options()
    major, minor = torch.cuda.get_device_capability()
    return nvrtc.compiler_options(f"sm_{major}{minor}" + "a" * ((major, minor) == HOPPER_CAPABILITY))


@cache
def count_sms(device: torch.device | None = None) -> int:
    """Return the number of multiprocessors of a GPU, by default the current one; if there is no GPU, of an H200."""
    if not torch.cuda.is_available():
        return H200_SMS
    return torch.cuda.get_device_properties(device or "cuda").multi_processor_count


@cache
def supports_pdl() -> bool:
    return torch.cuda.get_device_capability() >= HOPPER_CAPABILITY


@cache
def driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
