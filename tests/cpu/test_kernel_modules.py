"""scripts/compile-kernels compiles the modules that a machine with an H100 or H200 looks for in the cache."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from emberline.kernels.cuda import (
    chain,
    collectives,
    decode,
    driver,
    few_experts,
    fp8_gate_up,
    fp8_gemm,
    fp8_wide,
    fused_experts,
    gemm,
    grouped,
    linear,
    narrow,
    narrow_wide,
    nvrtc,
    prefill,
    quantise_rows,
    router,
    routing,
    sample,
    uw12,
    wide,
)
from emberline.kernels.cuda.driver import CudaModule
from emberline.kernels.cuda.kernel_modules import find_sources, list_modules

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile-kernels"
GATED = narrow.FourBitPlan(2, 4, narrow.FEW_WARPS, 1, 1, 1, 1).kernel_name("Float4<8>")
WIDE_NARROW = narrow_wide.WideFourBitPlan(2, 128, 1, 1).kernel_name("Int4<2, true>")
# By Python module: a kernel as a launch gets it. `routing` loads its kernels when it makes them.
LAUNCHED: dict[str, Callable[[], Any]] = {
    "chain": lambda: chain._get_kernel(chain.VARIANTS[0]),
    "collectives": lambda: collectives._get_kernel("reduce_add_norm<bf16, 2, 4>", 4),
    "decode": lambda: decode._get_kernel(decode._choose_variant(128, 2, 4, False, True)),
    "few_experts": lambda: few_experts._get_kernel(few_experts.VARIANTS[0]),
    "fp8_gate_up": lambda: fp8_gate_up._get_kernel(fp8_gate_up.VARIANTS[0]),
    "fp8_gemm": lambda: fp8_gemm._get_kernel(fp8_gemm.VARIANTS[0]),
    "fp8_wide": lambda: fp8_wide._get_kernel(fp8_wide.VARIANTS[0]),
    "fused_experts": lambda: fused_experts._get_kernel(fused_experts.EXPERTS_PER_LANE[0]),
    "gemm": lambda: gemm._get_kernel(gemm.VARIANTS[0]),
    "grouped": lambda: grouped._get_kernel(grouped.VARIANTS[0]),
    "linear": lambda: linear._get_kernel(linear.VARIANTS[0]),
    "narrow": lambda: narrow._get_kernel(GATED),
    "narrow_wide": lambda: narrow_wide._get_kernel(WIDE_NARROW),
    "prefill": lambda: prefill._get_kernel(128, False),
    "quantise_rows": lambda: quantise_rows._get_kernel(quantise_rows.VARIANTS[0]),
    "router": lambda: router._get_kernel(router.CHUNK_COUNTS[0]),
    "routing": lambda: routing._get_module().kernel("sort_rows"),
    "sample": lambda: sample._get_kernels()["sample"],
    "uw12": lambda: uw12._get_kernel("unpack"),
    "wide": lambda: wide._get_kernel(wide.VARIANTS[0]),
}


def test_every_source_is_tested() -> None:
    assert set(LAUNCHED) == set(find_sources())


@pytest.mark.parametrize("name", LAUNCHED)
def test_launches_load_modules_of_the_list(name: str) -> None:
    module = LAUNCHED[name]()._module
    assert (module.file, module.kernels) in {(each.file, each.kernels) for each in list_modules(name)}


def test_list_has_every_kernel_once() -> None:
    modules = list_modules()
    found = [(module.file, module.kernels) for module in modules]
    assert len(set(found)) == len(found)
    for source in find_sources().values():
        own = {kernel for module in modules if module.file == source.FILE for kernel in module.kernels}
        assert set(source.VARIANTS) <= own


def test_plans_of_narrow_products_use_kernels_of_the_list() -> None:
    for rows, tiles, n, (units, unit_bytes) in product((1, 16, 32), (1, 40), (96, 4096), ((1, 1056), (32, 1152))):
        plan = narrow.choose_plan(rows, tiles, n, units, unit_bytes)
        assert plan.kernel_name("Int4<4, true>") in narrow.KERNELS
    for columns, experts, n in product(narrow_wide.COLUMNS, (1, 128), (64, 4096)):
        found = narrow_wide.choose_plan(columns, experts, n, 32, 1152)
        assert found.kernel_name("Float4<4>") in narrow_wide.KERNELS


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Compile nothing, and return the kernels of each module that would have been compiled."""
    try:
        nvrtc.compiler_version()
    except nvrtc.KernelCompileError as missing:
        pytest.skip(str(missing))
    found: list[tuple[str, ...]] = []

    def compile_kernels(file: str, kernels: tuple[str, ...], options: tuple[str, ...]) -> nvrtc.KernelBinary:
        found.append(kernels)
        return nvrtc.KernelBinary(b"code", {name: name for name in kernels})

    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_kernels", compile_kernels)
    return found


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    return int(runpy.run_path(str(SCRIPT))["main"]())


def test_script_compiles_what_a_hopper_gpu_looks_for(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(monkeypatch, "router", "uw12", "--threads", "2") == 0
    assert sorted(compiled) == sorted([*((name,) for name in router.VARIANTS), uw12.VARIANTS])
    assert f"compiled={len(compiled)} failed=0" in capsys.readouterr().out
    compiled.clear()
    assert run_script(monkeypatch, "uw12") == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(driver, "device_options", driver.device_options.__wrapped__)
    assert CudaModule(uw12.FILE, uw12.VARIANTS).compile().code == b"code"
    assert not compiled and "uw12: compiled=0 in_cache=1 failed=0" in capsys.readouterr().out


def test_script_reports_kernels_that_do_not_compile(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise nvrtc.KernelCompileError("compiling uw12.cu failed: no such register")

    monkeypatch.setattr(nvrtc, "compile_kernels", fail)
    assert run_script(monkeypatch, "uw12") == 1
    written = capsys.readouterr()
    assert "compiled=0 failed=1" in written.out and "no such register" in written.err


def test_unknown_sources_are_refused(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"no kernels are named narow \(hint: choose from .*narrow,"):
        list_modules("narow", "narrow")
    with pytest.raises(SystemExit):
        run_script(monkeypatch, "narow")
    assert "no kernels are named narow" in capsys.readouterr().err and not compiled
