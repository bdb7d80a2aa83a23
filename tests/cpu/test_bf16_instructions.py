"""Products by bfmmla and vdpbf16ps have the bits that these instructions define, and the same ones in any batch.

Few machines have the instructions. Software models of them run everywhere; bfmmla runs in qemu if it is installed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import test_kernels
import torch
from bf16_instructions import (
    EMULATED,
    INSTRUCTIONS,
    can_compile,
    compile_sources,
    exact_order_product,
    find_program,
    has_avx512,
    model_library,
)
from test_kernels import BF16, assert_close
from torch import Tensor

from emberline.core.config import kernel_dir
from emberline.kernels import backend, ops
from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.cpu.build import COMPILE_FLAGS, SOURCE_DIR, build_library
from emberline.kernels.cpu.cpu_backend import CPUBackend
from emberline.kernels.cpu.library import load_library
from emberline.kernels.packed_weight import WeightLayout

EMULATOR_TIMEOUT_S = 60
NATIVE_INSTRUCTIONS = {"avx512 and bf16": "vdpbf16ps", "neon and bf16": "bfmmla"}  # by the name of the kernels
ARM_BF16 = "-march=armv8.2-a+bf16"
X86 = ("-march=x86-64-v3", "-mavx512f", "-mavx512bw")
# Rows, columns and k: single rows and odd ones, one tile and several, bands of 256 rows; whole panels and parts; k that
# is a multiple of 2, 4, 32 or 128 or not, and more than one piece.
SHAPES = [(1, 1, 1), (1, 64, 576), (2, 33, 70), (5, 100, 129), (13, 17, 31), (8, 32, 128), (31, 65, 1100), (517, 9, 40)]


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, model_library(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def instruction(model: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run ops with the model of an instruction, whose name it returns."""
    torch.manual_seed(0)
    monkeypatch.setattr(backend, "_backend", CPUBackend(load_library(model[1])))
    ops.set_threads(2)
    yield model[0]
    ops.set_threads(2)


def to_bits(x: Tensor | np.ndarray) -> np.ndarray:
    return (x.numpy() if isinstance(x, Tensor) else x).view(np.uint32)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_bits_are_those_that_the_instruction_defines(instruction: str, m: int, n: int, k: int) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k).to(BF16)
    packed = ops.pack_linear(weight)
    assert packed.layout is WeightLayout.BF16_TILES
    expected = exact_order_product(instruction, x.numpy(), weight.float().numpy())
    assert np.array_equal(to_bits(ops.linear(x, LinearLayer(packed))), to_bits(expected))


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_bits_of_this_cpu_are_those_of_the_definition(m: int, n: int, k: int) -> None:
    instruction = NATIVE_INSTRUCTIONS.get(CPUBackend(load_library(build_library(kernel_dir()))).isa)
    if instruction is None:
        pytest.skip("this CPU has neither instruction, or has AMX")
    torch.manual_seed(0)
    x, weight = torch.randn(m, k), torch.randn(n, k).to(BF16)
    expected = exact_order_product(instruction, x.numpy(), weight.float().numpy())
    assert np.array_equal(to_bits(ops.linear(x, LinearLayer(ops.pack_linear(weight)))), to_bits(expected))


@pytest.mark.parametrize("k", [70, 1100])
def test_bits_of_a_row_depend_on_no_other_row(instruction: str, k: int) -> None:
    m, layer = 290, LinearLayer(ops.pack_linear(torch.randn(20, k).to(BF16)))
    x = torch.randn(m, k)
    whole = ops.linear(x, layer)
    assert torch.equal(torch.cat([ops.linear(row[None], layer) for row in x[:30]]), whole[:30])
    x[17, 3] = torch.nan
    clean = [row for row in range(m) if row != 17]
    for threads in (1, 2):
        ops.set_threads(threads)
        y = ops.linear(x, layer)
        assert y[17].isnan().all() and torch.equal(y[clean], whole[clean])
        for start, stop in [(0, 2), (1, 9), (16, 18), (3, 16), (9, 40), (34, 290), (33, 290), (289, 290)]:
            assert torch.equal(ops.linear(x[start:stop], layer).nan_to_num(), y[start:stop].nan_to_num())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 960, 576), (9, 64, 1536), (20, 17, 4096)])
def test_error_is_at_most_twice_that_of_float32(instruction: str, m: int, n: int, k: int) -> None:
    x, weight = torch.randn(m, k).to(BF16).float(), torch.randn(n, k).to(BF16)
    theirs = torch.nn.functional.linear(x, weight.float())
    assert_close(ops.linear(x, LinearLayer(ops.pack_linear(weight))), theirs, x.double() @ weight.double().T)


@pytest.mark.parametrize(("m", "n", "k"), [(2, 960, 576), (3, 33, 70), (61, 200, 576)])
def test_products_pass_the_checks_of_all_kernels(instruction: str, m: int, n: int, k: int) -> None:
    test_kernels.test_linear(m, n, k, BF16)
    test_kernels.test_norm_and_gate(m, n, k)
    test_kernels.test_bf16_inputs_are_rounded_at_most_once(m, n, k)


def test_rows_with_norm_and_gate_are_independent(instruction: str) -> None:
    test_kernels.test_linear_rows_are_independent(BF16, 77)
    test_kernels.test_embed()


def test_denormal_numbers_count_as_zero(instruction: str) -> None:
    layer = LinearLayer(ops.pack_linear(torch.full((3, 4), 1e-39).to(BF16)))
    assert torch.equal(ops.linear(torch.full((2, 4), 1e38), layer), torch.zeros(2, 3))
    layer = LinearLayer(ops.pack_linear(torch.full((3, 4), 1e-20).to(BF16)))
    assert torch.equal(ops.linear(torch.full((2, 4), 1e-20), layer), torch.zeros(2, 3))


def test_infinite_weight_changes_only_its_output(instruction: str) -> None:
    """k is padded with zeros, not with the weights of the next output."""
    x, weight = torch.randn(3, 70), torch.randn(9, 70).to(BF16)
    clean = ops.linear(x, LinearLayer(ops.pack_linear(weight)))
    weight[5, 0] = torch.inf
    y = ops.linear(x, LinearLayer(ops.pack_linear(weight)))
    others = [n for n in range(9) if n != 5]
    assert y[:, 5].isinf().all() and torch.equal(y[:, others], clean[:, others])


@pytest.mark.skipif(not has_avx512(), reason="the layout of AMX is that of panels for AVX-512")
@pytest.mark.parametrize(("answer", "isa"), [(-1, "avx512 and bf16"), (0, "avx512 and amx")])
def test_amx_is_chosen_only_if_it_is_granted(tmp_path: Path, model: tuple[str, Path], answer: int, isa: str) -> None:
    if model[0] != "vdpbf16ps":
        pytest.skip("no CPU has AMX and bfmmla")
    path = Path(shutil.copy(model[1], tmp_path))  # a library asks once
    library = ctypes.CDLL(str(path))
    try:
        ctypes.c_long.in_dll(library, "test_amx_answer").value = answer
    except ValueError:
        pytest.skip("the compiler does not know AMX")
    chosen = CPUBackend(load_library(path))
    assert chosen.isa == isa
    weight, ids = torch.randn(70, 50).to(BF16), torch.arange(70)
    packed = chosen.pack_linear(weight)
    assert packed.layout is WeightLayout.BF16_TILES
    assert torch.equal(chosen.embed(ids, packed), weight.float())  # packed and read in the same layout
    if answer:
        x = torch.randn(3, 50)
        expected = exact_order_product("vdpbf16ps", x.numpy(), weight.float().numpy())
        y = chosen.linear(x, LinearLayer(packed), LinearOutput())
        assert np.array_equal(to_bits(y), to_bits(expected))


def assembly(compiler: str, *flags: str) -> str:
    command = [compiler, *COMPILE_FLAGS, "-O1", *flags, "-S", str(SOURCE_DIR / "bf16_dot.cpp"), "-o", "-"]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=EMULATOR_TIMEOUT_S).stdout


def test_vdpbf16ps_is_used_where_the_compiler_may() -> None:
    compiler = find_program("g++", "clang++", "x86_64-linux-gnu-g++")
    if not can_compile(compiler, *X86, "-mavx512bf16"):
        pytest.skip("the compiler does not know AVX512-BF16")
    assert len(re.findall(r"\bvdpbf16ps\b.*%zmm", assembly(compiler, *X86, "-mavx512bf16"))) >= 2 * 12
    assert "vdpbf16ps" not in assembly(compiler, *X86)


def test_bfmmla_is_used_where_the_compiler_may() -> None:
    compiler = find_program("aarch64-linux-gnu-g++")
    assert len(re.findall(r"\bbfmmla\b", assembly(compiler, ARM_BF16))) >= 8 + 16 + 12 + 16
    assert "bfmmla" not in assembly(compiler, "-march=armv8.2-a")


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the emulator and a program for it."""
    emulator, compiler = find_program("qemu-aarch64", "qemu-aarch64-static"), find_program("aarch64-linux-gnu-g++")
    sources = [EMULATED / "run_bf16_dot.cpp", SOURCE_DIR / "bf16_dot.cpp", SOURCE_DIR / "pool.cpp"]
    target = tmp_path_factory.mktemp("arm") / "run"
    return emulator, compile_sources(compiler, target, sources, ARM_BF16, "-static")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 33, 70), (19, 50, 1100)])
def test_bfmmla_in_an_emulator(tmp_path: Path, arm_program: tuple[str, Path], m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(m, k), torch.randn(n, k).to(BF16)
    shape = np.array([m, n, k], np.int32)
    given, output = tmp_path / "input", tmp_path / "output"
    given.write_bytes(shape.tobytes() + x.numpy().tobytes() + weight.view(torch.int16).numpy().tobytes())
    emulator, program = arm_program
    subprocess.run([emulator, "-cpu", "max", program, given, output], check=True, timeout=EMULATOR_TIMEOUT_S)
    found = np.fromfile(output, np.uint32).reshape(2, m, n)
    expected = exact_order_product("bfmmla", x.numpy(), weight.float().numpy())
    assert np.array_equal(found[0], to_bits(expected)) and np.array_equal(found[1], found[0])
