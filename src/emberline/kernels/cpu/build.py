"""Compiles the C++ sources beside this file for the machine at hand, once, into a cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# No contraction: products and sums fuse only where the source says fma, so bits do not depend on what was vectorised.
# No early scheduling: it lengthens the tiles' register lives until they spill.
MATHS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-schedule-insns")
# Left to itself the compiler writes 256-bit code for machines with 512: a gated product then took 1.8 times as long.
NATIVE = {
    "aarch64": ("-mcpu=native",),
    "arm64": ("-mcpu=native",),  # macOS's name of it
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
}
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", *MATHS)
BUILD_SECONDS = 300


class BuildError(Exception):
    """There is no native library on this machine, and why."""


def build(cache: Path) -> Path:
    """The library's path in `cache`, compiled if no earlier build fits these sources, this compiler and this CPU."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)}); install g++")
    native = [compiler, *FLAGS, *NATIVE.get(platform.machine(), ("-march=native",))]
    path = cache / f"ember-{_key(native)}.so"
    if path.exists():
        return path
    # Some versions of clang refuse "native" for some CPUs; portable kernels are still faster than plain torch.
    portable = [compiler, *FLAGS]
    other = cache / f"ember-{_key(portable)}.so"
    if other.exists():
        return other
    try:
        _compile(native, path)
    except BuildError:
        _compile(portable, other)
        return other
    return path


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        _run([*command, *sources, "-o", str(made)])
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)  # whole or not at all: another process may be building the same, and the power may fail


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=BUILD_SECONDS).stdout
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.decode(errors='replace')[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not finish: {error}") from error


def _key(command: list[str]) -> str:
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(_run([command[0], "--version"]))
    digest.update(_cpu_features())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    """What -march=native looks at; a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.lower().startswith((b"flags", b"features", b"cpu part"))}))
