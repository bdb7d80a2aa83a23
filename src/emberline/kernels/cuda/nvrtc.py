"""compile: CUDA C++ to machine code with the NVRTC library that torch's CUDA builds bring. compiled: kept on disk once
made.

Needs no GPU and no CUDA toolkit, so that kernels are compiled in tests on any machine. Sources include no headers.
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

OPTIONS = ("--std=c++17", "--gpu-architecture=sm_90a", "-default-device")
SOURCES = Path(__file__).parent


class CompileError(Exception):
    """The compiler's log, or why there is no compiler."""


@dataclass(frozen=True, slots=True)
class Binary:
    code: bytes
    symbols: dict[str, str]  # the kernel as its caller writes it, `decode<128, 4>`, to its name in the code


def compile(file: str, kernels: Sequence[str]) -> Binary:
    """The kernels of SOURCES/file; `kernels` are names or template instances."""
    return _compile(_library(), source(file), file, kernels)


def compiled(file: str, kernels: Sequence[str]) -> Binary:
    """The same, made once for these sources and this compiler."""
    parts = [source(file), *OPTIONS, *kernels, version()]
    kept = kernel_dir() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.cubin"
    if (binary := _read(kept)) is None:
        binary = compile(file, kernels)
        head = json.dumps([binary.symbols, zlib.crc32(binary.code)])
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        draft.write_bytes(head.encode() + b"\n" + binary.code)
        draft.replace(kept)
    return binary


def _read(kept: Path) -> Binary | None:
    """None: there is none, or it is not as it was written, as when the power failed."""
    try:
        head, _, code = kept.read_bytes().partition(b"\n")
        symbols, checksum = json.loads(head)
    except (OSError, ValueError, TypeError):
        return None
    return Binary(code, symbols) if zlib.crc32(code) == checksum else None


def version() -> str:
    """The compiler's."""
    library, major, minor = _library(), ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def sources_digest() -> str:
    """Name all sources of kernels and the compiler's version: it changes when any of them does."""
    texts = [path.read_text() for path in sorted(SOURCES.glob("*.cu*"))]
    return hashlib.sha256(chr(0).join([*texts, *OPTIONS, version()]).encode()).hexdigest()


def source(file: str) -> str:
    """All that is compiled of it."""
    return _inlined(SOURCES / file)


def _inlined(path: Path) -> str:
    """The source with its `#include "file"` lines replaced by our own files of that name."""
    lines = []
    for line in path.read_text().splitlines():
        quoted = line.strip().removeprefix('#include "')
        lines.append(_inlined(path.parent / quoted[:-1]) if quoted != line.strip() else line)
    return "\n".join(lines)


def _compile(library: ctypes.CDLL, text: str, name: str, kernels: Sequence[str]) -> Binary:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        for kernel in kernels:
            _check(library, library.nvrtcAddNameExpression(program, kernel.encode()))
        flags = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
        if library.nvrtcCompileProgram(program, len(OPTIONS), flags):
            raise CompileError(f"{name}: {_log(library, program)}")
        symbols = {}
        for kernel in kernels:
            lowered = ctypes.c_char_p()
            _check(library, library.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(lowered)))
            symbols[kernel] = (lowered.value or b"").decode()
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, code))
        return Binary(code.raw, symbols)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise CompileError(library.nvrtcGetErrorString(status).decode())


@cache
def _library() -> ctypes.CDLL:
    for name in _candidates():
        try:
            # It looks for its other half by name alone: found if it is loaded already, wherever it lies.
            for half in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(half))
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise CompileError("there is no libnvrtc: install a CUDA build of torch, or nvidia-cuda-nvrtc")


def _candidates() -> list[str]:
    """Packages of this Python first, then the system's."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found.submodule_search_locations or [])] if found else []
    packaged = [str(file) for root in roots for file in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    system = ctypes.util.find_library("nvrtc")
    return [*packaged, *([system] if system else []), "/usr/local/cuda/lib64/libnvrtc.so"]
