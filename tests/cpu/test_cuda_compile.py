"""Every CUDA kernel compiles for Hopper in every variant that may be launched. No GPU is needed.

Most of a compilation is optimisation, which these tests do not need: with QUICK the compiler still checks syntax, types
and inline assembly and produces machine code, in a third of the time. The result is cached by the text of the sources,
so that only changed files are compiled again. GPU tests run the optimised kernels.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

from emberline.kernels import cuda
from emberline.kernels.cuda import nvrtc, sample

NAMES = [module.name for module in pkgutil.iter_modules(cuda.__path__)]
MODULES = [importlib.import_module(f"{cuda.__name__}.{name}") for name in NAMES]
OPTIONS = nvrtc.compiler_options()
QUICK = (*OPTIONS, "--Ofast-compile=max")
KERNELS = [module for module in MODULES if hasattr(module, "FILE") and hasattr(module, "VARIANTS")]


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        nvrtc._library()
    except nvrtc.KernelCompileError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("module", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_all_variants_compile(module: ModuleType) -> None:
    binary = nvrtc.compile_cached(module.FILE, module.VARIANTS, QUICK)
    assert binary.code[:4] == b"\x7fELF"
    assert set(binary.symbols) == set(module.VARIANTS)
    assert all(symbol.encode() in binary.code for symbol in binary.symbols.values())


@pytest.mark.parametrize("broken", ["undeclared();", 'asm volatile("mov.u99 %r0, 1;");', "int* p = 1.5f;"])
def test_broken_kernel_does_not_compile(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void run(float* out) { %s *out = 1.f; }'
    (tmp_path / "run.cu").write_text(source % "")
    monkeypatch.setattr(nvrtc, "SOURCE_DIR", tmp_path)
    assert nvrtc.compile_kernels("run.cu", ["run"], QUICK).symbols == {"run": "run"}
    (tmp_path / "run.cu").write_text(source % broken)
    with pytest.raises(nvrtc.KernelCompileError, match=r"run\.cu"):
        nvrtc.compile_kernels("run.cu", ["run"], QUICK)


def test_compiled_kernels_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    first = nvrtc.compile_cached(sample.FILE, sample.VARIANTS, OPTIONS)
    (kept,) = (tmp_path / "kernels").iterdir()
    monkeypatch.setattr(nvrtc, "compile_kernels", lambda file, kernels, options: pytest.fail("compiled again"))
    assert nvrtc.compile_cached(sample.FILE, sample.VARIANTS, OPTIONS) == first and kept.suffix == ".cubin"
    whole = kept.read_bytes()
    monkeypatch.setattr(nvrtc, "compile_kernels", lambda file, kernels, options: first)
    for torn in (b"", whole[:20], whole[: len(whole) // 2], b"7\n", b"{}\n", whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(torn)
        assert nvrtc.compile_cached(sample.FILE, sample.VARIANTS, OPTIONS) == first and kept.read_bytes() == whole


def test_every_source_file_is_tested() -> None:
    sources = {file.name for file in nvrtc.SOURCE_DIR.glob("*.cu")}
    assert sources == {module.FILE for module in KERNELS}


def test_digest_contains_kernels_and_their_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice may need kernels that an earlier start did not compile."""
    monkeypatch.setattr(nvrtc, "SOURCE_DIR", tmp_path / "cuda")
    digests = {nvrtc.digest_sources(OPTIONS), nvrtc.digest_sources(QUICK)}
    for file in ("cuda/run.cu", "cuda/run.cuh", "cuda/plan.py", "triton/run.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("1")
        digests.add(nvrtc.digest_sources(OPTIONS))
    assert len(digests) == 6
