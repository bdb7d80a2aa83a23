"""Compiles the collective kernels for a CPU, where CUDA threads are threads, with the headers in `emulated_cuda/`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from emberline.kernels.cuda import nvrtc

EMULATED = Path(__file__).parent / "emulated_cuda"
COMPILE_TIMEOUT_S = 120


def compile_emulated(folder: Path, source: str, options: Sequence[str], edits: Sequence[tuple[str, str]] = ()) -> Path:
    """Return a program or library made of `source` and the kernels, after text of them was replaced by `edits`."""
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    for file in EMULATED.iterdir():
        shutil.copy(file, folder)
    for name in ("barrier.cuh", "collectives.cu"):
        text = (nvrtc.SOURCE_DIR / name).read_text()
        text = re.sub(r"__shared__ (\w+) (\w+)(\S+);", r"auto& \2 = shared_memory<\1\3>();", text)
        for right, wrong in edits:
            text = text.replace(right, wrong)
        (folder / name).write_text(text)
    command = [compiler, "-std=c++20", "-O1", "-pthread", "-w", *options, source, "-o", "made"]
    subprocess.run(command, cwd=folder, check=True, timeout=COMPILE_TIMEOUT_S)
    return folder / "made"
