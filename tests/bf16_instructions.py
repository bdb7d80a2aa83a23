"""The bf16 instructions of CPUs: what they compute, in NumPy, and the kernels compiled for them or for software models.

`emulated_cpu/` has the models in C++. The library of a model also has the parts of this machine's library that do not
depend on these instructions.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from emberline.core.config import kernel_dir
from emberline.kernels.cpu.build import COMPILE_FLAGS, NATIVE_FLAGS, SOURCE_DIR, build_library

EMULATED = Path(__file__).parent / "emulated_cpu"
COMPILE_TIMEOUT_S = 120
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
INSTRUCTIONS = ("bfmmla", "vdpbf16ps")
CHAIN = 128  # products that are added to one sum, before it is added to the output

Floats = NDArray[np.float32]


def find_program(*names: str) -> str:
    return next(filter(None, map(shutil.which, names)), None) or pytest.skip(f"needs {' or '.join(names)}")


def can_compile(compiler: str, *flags: str) -> bool:
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=b"", capture_output=True, timeout=COMPILE_TIMEOUT_S).returncode == 0


def compile_sources(compiler: str, target: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Compile `sources`, which may end with libraries."""
    command = [compiler, *COMPILE_FLAGS, "-O1", f"-I{SOURCE_DIR}", *flags, *map(str, sources), "-o", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    assert made.returncode == 0, made.stderr[-2000:]
    return target


def model_library(folder: Path, instruction: str) -> Path:
    """Return a library whose bf16 products use the model of an instruction.

    On a machine with AVX-512 it is also compiled for AMX, of which `test_amx_answer` in it says whether it is granted.
    """
    compiler = find_program("g++", "c++", "clang++")
    rest = build_library(kernel_dir())
    native = NATIVE_FLAGS.get(platform.machine(), ("-march=native",))
    sources = [SOURCE_DIR / "linear.cpp", SOURCE_DIR / "bf16_dot.cpp"]
    model = (f"-DEMBER_{instruction.upper()}=1", f'-DEMBER_BF16_MODEL="{EMULATED / instruction}.h"')
    if has_avx512() and can_compile(compiler, *AMX_FLAGS):
        native = (*native, *AMX_FLAGS)
        sources += [SOURCE_DIR / "amx.cpp", EMULATED / "amx_permission.cpp"]
    # With -Bsymbolic it calls its own functions rather than those of the other library, or of libc, with the same name.
    flags = *native, *model, "-shared", "-Wl,-Bsymbolic"
    return compile_sources(compiler, folder / f"{instruction}.so", [*sources, rest], *flags)


def has_avx512() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and {"avx512f", "avx512bw", "f16c"} <= set(info.read_text().split())


def round_to_bf16(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def add_to_odd(a: Floats, b: Floats) -> Floats:
    """Return a + b rounded to odd, as Arm's bf16 instructions round: an inexact sum is cut off, its last bit set."""
    wide = a.astype(np.float64), b.astype(np.float64)
    total = wide[0] + wide[1]
    part = total - wide[0]
    error = (wide[0] - (total - part)) + (wide[1] - part)
    rounded = total.astype(np.float32)
    off = np.where(rounded == total, error, total - rounded)  # how much is missing
    bits = rounded.view(np.uint32).astype(np.int64) - ((off != 0) & ((off < 0) == (total > 0)))
    return np.where(off == 0, bits, bits | 1).astype(np.uint32).view(np.float32)


def exact_order_product(instruction: str, x: Floats, weight: Floats) -> Floats:
    """Return x @ weight.T to the bit as the kernel computes it. The weight has bf16 values."""
    depth = -(-x.shape[1] // 32) * 32
    pad = ((0, 0), (0, depth - x.shape[1]))
    a, b = np.pad(round_to_bf16(x), pad), np.pad(weight, pad)

    def product(i: int) -> Floats:  # exact: 8 bits times 8 bits
        return a[:, i, None] * b[None, :, i]

    total = None
    for start in range(0, depth, CHAIN):
        chain = np.zeros((len(x), len(weight)), np.float32)
        for i in range(start, min(start + CHAIN, depth), 2):
            if instruction == "bfmmla":
                chain = add_to_odd(chain, add_to_odd(product(i), product(i + 1)))
            else:
                chain = chain + product(i + 1) + product(i)
        total = chain if total is None else total + chain
    assert total is not None
    return total
