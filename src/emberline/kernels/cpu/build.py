"""Compiles the C++ sources in this folder for the current machine, once, into a cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emberline.core.cpus import core_count

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# No contraction: multiply-adds fuse only where the source calls fma, so that results do not depend on vectorisation.
# No scheduling before register allocation: it extends the live ranges of register tiles until they spill.
MATH_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-schedule-insns")
# By default the compiler emits 256-bit code for CPUs with 512-bit vectors; a gated product then took 1.8 times as long.
NATIVE_FLAGS = {
    "aarch64": ("-mcpu=native",),
    "arm64": ("-mcpu=native",),  # the name that macOS uses for it
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
}
COMPILE_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", *MATH_FLAGS)
BUILD_TIMEOUT_S = 300


class NativeBuildError(Exception):
    """The native library cannot be built on this machine; the message says why."""


def build_library(cache_dir: Path) -> Path:
    """Return the path of the library for these sources, this compiler and this CPU.

    Compile it if it is missing. Raises NativeBuildError if there is no compiler or the compiler fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeBuildError(f"no C++ compiler found among {', '.join(COMPILERS)} (hint: install g++)")
    native = [compiler, *COMPILE_FLAGS, *NATIVE_FLAGS.get(platform.machine(), ("-march=native",))]
    path = cache_dir / f"ember-{_cache_key(native)}.so"
    if path.exists():
        return path
    # Some versions of clang reject "native" for some CPUs. Portable kernels are still faster than plain torch.
    portable = [compiler, *COMPILE_FLAGS]
    portable_path = cache_dir / f"ember-{_cache_key(portable)}.so"
    if portable_path.exists():
        return portable_path
    try:
        _compile(native, path)
    except NativeBuildError:
        _compile(portable, portable_path)
        return portable_path
    return path


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name

        def compile_source(source: Path) -> str:
            target = str(output.with_name(f"{source.stem}.o"))
            _run_compiler([*command, "-c", str(source), "-o", target])
            return target

        sources = sorted(SOURCE_DIR.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # large ones take longest
        with ThreadPoolExecutor(core_count()) as pool:
            objects = list(pool.map(compile_source, sources))
        _run_compiler([*command, "-shared", *objects, "-o", str(output)])
        with output.open("rb") as file:
            os.fsync(file.fileno())
        output.replace(path)  # atomic: another process may build the same, and power may fail


def _run_compiler(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=BUILD_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace")[-2000:]
        raise NativeBuildError(f"compiling the CPU kernels with {command[0]} failed: {output}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"compiling the CPU kernels with {command[0]} did not finish: {error}") from error


def _cache_key(command: list[str]) -> str:
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(_run_compiler([command[0], "--version"]))
    digest.update(_cpu_features())
    for source in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    """Return this CPU's features as part of the cache key: machines that share a cache folder may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.lower().startswith((b"flags", b"features", b"cpu part"))}))
