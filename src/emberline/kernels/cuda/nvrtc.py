"""compile_kernels and compile_cached: compile CUDA C++ with the NVRTC that is part of torch.

Compiling needs no GPU and no CUDA toolkit, so that tests can do it on any machine. Sources include no system headers.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import json
import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from emberline.core.config import kernel_dir

HOPPER_ARCHITECTURE = "sm_90a"
SOURCE_DIR = Path(__file__).parent


def compiler_options(architecture: str = HOPPER_ARCHITECTURE) -> tuple[str, ...]:
    return "--std=c++17", f"--gpu-architecture={architecture}", "-default-device"


class KernelCompileError(Exception):
    """A kernel could not be compiled; the message is the compiler's log, or says that NVRTC is missing."""


@dataclass(frozen=True, slots=True)
class KernelBinary:
    code: bytes
    symbols: dict[str, str]  # from the kernel as callers write it, `decode<128, 4>`, to its mangled name


def compile_kernels(file: str, kernels: Sequence[str], options: Sequence[str]) -> KernelBinary:
    """Compile kernels of a file in SOURCE_DIR; `kernels` are names of functions or template instances."""
    return _compile_source(_library(), read_source(file), file, kernels, options)


def compile_cached(file: str, kernels: Sequence[str], options: Sequence[str]) -> KernelBinary:
    """Return the kernels from the cache on disk, or compile them if the sources or the compiler changed."""
    cache_file = find_cache_file(file, kernels, options)
    if (binary := _read_cached(cache_file)) is None:
        binary = compile_kernels(file, kernels, options)
        head = json.dumps([binary.symbols, zlib.crc32(binary.code)])
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache_file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        temporary.write_bytes(head.encode() + b"\n" + binary.code)
        temporary.replace(cache_file)
    return binary


def find_cache_file(file: str, kernels: Sequence[str], options: Sequence[str]) -> Path:
    """Return where `compile_cached` keeps these kernels."""
    parts = [read_source(file), *options, *kernels, compiler_version()]
    return kernel_dir() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.cubin"


def _read_cached(cache_file: Path) -> KernelBinary | None:
    """Return the cached kernels, or None if the file is missing or was damaged by a power failure."""
    try:
        head, _, code = cache_file.read_bytes().partition(b"\n")
        symbols, checksum = json.loads(head)
    except (OSError, ValueError, TypeError):
        return None
    return KernelBinary(code, symbols) if zlib.crc32(code) == checksum else None


def compiler_version() -> str:
    """Return the version of NVRTC."""
    library, major, minor = _library(), ctypes.c_int(), ctypes.c_int()
    _check_status(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def digest_sources(options: Sequence[str]) -> str:
    """Return a digest of all kernel sources, the code that chooses kernels, the compiler's options and its version."""
    files = [path for pattern in ("cuda/*.cu*", "*/*.py") for path in sorted(SOURCE_DIR.parent.glob(pattern))]
    texts = [path.read_text() for path in files]
    return hashlib.sha256(chr(0).join([*texts, *options, compiler_version()]).encode()).hexdigest()


def read_source(file: str) -> str:
    """Return the source text of a file, with the files that it includes inserted."""
    return _read_with_includes(SOURCE_DIR / file)


def _read_with_includes(path: Path) -> str:
    """Return the source with its `#include "file"` lines replaced by those files."""
    lines = []
    for line in path.read_text().splitlines():
        quoted = line.strip().removeprefix('#include "')
        lines.append(_read_with_includes(path.parent / quoted[:-1]) if quoted != line.strip() else line)
    return "\n".join(lines)


def _compile_source(
    library: ctypes.CDLL, source: str, name: str, kernels: Sequence[str], options: Sequence[str]
) -> KernelBinary:
    program = ctypes.c_void_p()
    _check_status(
        library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    )
    try:
        for kernel in kernels:
            _check_status(library, library.nvrtcAddNameExpression(program, kernel.encode()))
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), flags):
            raise KernelCompileError(f"compiling {name} failed: {_compiler_log(library, program)}")
        symbols = {}
        for kernel in kernels:
            lowered = ctypes.c_char_p()
            _check_status(library, library.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(lowered)))
            symbols[kernel] = (lowered.value or b"").decode()
        size = ctypes.c_size_t()
        _check_status(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check_status(library, library.nvrtcGetCUBIN(program, code))
        return KernelBinary(code.raw, symbols)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compiler_log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _check_status(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise KernelCompileError(
            f"a call of the CUDA compiler NVRTC failed: {library.nvrtcGetErrorString(status).decode()}"
        )


@cache
def _library() -> ctypes.CDLL:
    for name in _library_candidates():
        try:
            # NVRTC loads its builtins library by name only, which succeeds if it is already loaded from its own folder.
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise KernelCompileError("libnvrtc not found (hint: install a CUDA build of torch, or nvidia-cuda-nvrtc)")


def _library_candidates() -> list[str]:
    """Return the paths to try for libnvrtc: those of installed Python packages, then those of the system."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found.submodule_search_locations or [])] if found else []
    packaged = [str(file) for root in roots for file in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    system = ctypes.util.find_library("nvrtc")
    return [*packaged, *([system] if system else []), "/usr/local/cuda/lib64/libnvrtc.so"]
