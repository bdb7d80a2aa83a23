"""The kernels of the portable backend compile for every GPU since Ampere, within its shared memory. No GPU is needed.

The kernels that take most of the time are compiled for all architectures, and each other one for the next in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton_cases  # noqa: E402
from latent_cases import LITE, LatentCase  # noqa: E402
from parallel_compilation import compiling_only  # noqa: E402
from test_triton import attention_inputs, compiled  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from emberline.kernels.cuda import nvrtc, sample, uw12  # noqa: E402
from emberline.kernels.cuda.decode import DecodeScratch  # noqa: E402
from emberline.kernels.mixture import Mixture, Routing, StackedExperts  # noqa: E402
from emberline.kernels.packed_weight import PackedWeight  # noqa: E402
from emberline.kernels.quantise import quantise  # noqa: E402
from emberline.kernels.triton import attention, latent_attention, linear, narrow, norm, packed_linear, router  # noqa: E402
from emberline.kernels.triton import jit as kernel_jit  # noqa: E402
from emberline.kernels.triton.activation import silu_mul  # noqa: E402
from emberline.kernels.triton.attention import paged_attention  # noqa: E402
from emberline.kernels.triton.decode import split_decode_attention  # noqa: E402
from emberline.kernels.triton.experts import run_routed_experts  # noqa: E402

BF16 = torch.bfloat16
# Bytes of shared memory that a program may use, by architecture.
SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
HEADS = (32, 8, 128)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def multiply_few_rows(m: int = 64) -> None:
    x, w = zeros(m, 4096), zeros(4096, 4096)
    linear.linear(x, w, out=x, residual=x, tile=linear.choose_tile(m, 4096, 4096, 132), pdl=True)


def multiply_gated(m: int = 8) -> None:
    x, w = zeros(m, 4096), zeros(28672, 4096)
    linear.linear(x, w, out=zeros(m, 14336), group=16, tile=linear.choose_tile(m, 28672, 4096, 132), pdl=True)


def multiply_packed() -> None:
    planes, headers = torch.zeros(64, 64, 4, 1536).byte(), torch.zeros(256, uw12.header_bytes(4096, 64)).byte()
    x, tile = zeros(8, 4096), packed_linear.choose_tile(8, 4096, 4096, 132)
    packed_linear.linear(x, uw12.UW12Weight(planes, headers, 4096, 4096), out=x, residual=x, tile=tile, pdl=True)


def attend_chunk() -> None:
    paged_attention(attention_inputs(BF16, BF16, HEADS), torch.zeros(1, 2, dtype=torch.int32), pdl=True)


def attend_with_large_heads() -> None:
    paged_attention(attention_inputs(BF16, BF16, (16, 8, 256)), torch.zeros(1, 2, dtype=torch.int32), pdl=True)


def attend_single_rows() -> None:
    work = triton_cases.plan_rows([(9, 1)], HEADS[1], 132, "cpu")
    scratch = DecodeScratch(1, work.capacity, *HEADS, torch.device("cpu"))
    split_decode_attention(attention_inputs(BF16, BF16, HEADS), work, scratch, 132, out=zeros(2, 4096), pdl=True)


def run_experts() -> None:
    mixture = Mixture(
        torch.zeros(2048),
        1e-6,
        PackedWeight(torch.zeros(16, 2048), 16, 2048, torch.float32),
        StackedExperts(zeros(16, 1536, 2048), zeros(16, 2048, 768)),
        Routing(8, renormalize=True),
    )
    normed, logits = router.norm_and_score(zeros(1, 2048), mixture.norm, 1e-6, zeros(16, 2048), pdl=True)
    run_routed_experts(normed, logits, mixture, pdl=True)


def run_elementwise() -> None:
    norm.rms_norm(zeros(2, 4096), torch.zeros(4096), 1e-5, pdl=True)
    silu_mul(zeros(2, 4096), zeros(2, 2048), 16, pdl=True)


def attend_latents() -> None:
    """Launch attention of latents for 32 pairs (query, head), and for chunks."""
    case = LatentCase.make(LITE, [(63, 2)], [(64, 2)], BF16, BF16, "cpu")
    q, layer, integers = case.inputs.q, case.inputs.layer, torch.zeros(8, 2, dtype=torch.int32)
    queries, sums = zeros(len(q), layer.attention.q_heads, layer.rank), torch.zeros(4096)
    inputs = (q, queries, layer, case.inputs.keys, case.inputs.metadata)
    latent_attention.decode_latents(*inputs, (integers, integers, 1), sums, sums, max_queries=2, pdl=True)
    latent_attention.attend_context(*inputs, integers, queries, sums, pdl=True)


def multiply_narrow(kind: Any) -> Callable[[], None]:
    def launch() -> None:
        matrix = quantise(torch.ones(64, 256), kind)
        narrow.multiply(zeros(16, 256), matrix, zeros(16, 64), pdl=True)

    return launch


CALLS: dict[str, Callable[[], None]] = {
    "experts": run_experts,
    "decode": attend_single_rows,
    "gated": multiply_gated,
    "packed": multiply_packed,
    "elementwise": run_elementwise,
    **{kind: multiply_narrow(kind) for kind in ("fp8", "int4", "mxfp4", "nvfp4")},
}
CASES = [(each, "few rows", multiply_few_rows) for each in SHARED_BYTES]
CASES += [(each, "chunk", attend_chunk) for each in (80, 89, 100, 120)]
CASES += [(86, "latents", attend_latents), (89, "large heads", attend_with_large_heads)]
CASES += [(each, name, call) for each, (name, call) in zip(cycle(SHARED_BYTES), CALLS.items(), strict=False)]


def fake_driver(architecture: int) -> SimpleNamespace:
    target = GPUTarget("cuda", architecture, 32)
    return SimpleNamespace(
        get_current_device=lambda: architecture, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )


@compiled
def test_products_are_compiled_in_parallel_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        jit.JITFunction,
        "__getitem__",
        lambda self, grid: lambda *a, **options: made.append(self.run(*a, grid=grid, warmup=False, **options)),
    )
    monkeypatch.setattr(driver, "_active", fake_driver(80))
    with kernel_jit.compile_in_parallel():
        multiply_few_rows(16)
        multiply_few_rows(64)
        assert [type(kernel).__name__ for kernel in made] == ["FutureKernel"] * 2
    assert all(future.kernel.asm["cubin"][:4] == b"\x7fELF" for future in made)
    with pytest.raises(AttributeError):  # outside the block a launch needs a real driver
        multiply_few_rows(16)


@compiled
def test_kernels_of_a_module_are_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU tests compile so what they launch later, also kernels that are launched in `compile_in_parallel`."""
    monkeypatch.setattr(driver, "_active", fake_driver(90))
    matrix, out = quantise(torch.ones(64, 256), "nvfp4"), torch.full((16, 64), 7.0)
    with compiling_only(narrow):
        for x in (zeros(16, 256), zeros(16, 256), zeros(3, 256)):
            narrow.multiply(x, matrix, out[: len(x)], pdl=True)
    made = narrow._multiply_narrow.device_caches[90][0].values()
    assert len(made) >= 1 and all(kernel.asm["cubin"][:4] == b"\x7fELF" for kernel in made)
    assert (out == 7).all()
    with pytest.raises(AttributeError):  # outside the block a launch needs a real driver
        narrow.multiply(zeros(16, 256), matrix, out, pdl=True)


@compiled
@pytest.mark.parametrize(("architecture", "name", "call"), CASES, ids=[f"{name}-sm{a}" for a, name, _ in CASES])
def test_kernel_compiles(
    architecture: int, name: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def launcher(self: Any, grid: object) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            kernel = self.run(*arguments, grid=grid, warmup=True, **options)
            while kernel.metadata.shared > SHARED_BYTES[architecture] and options["num_stages"] > 1:  # as jit does
                options["num_stages"] -= 1
                kernel = self.run(*arguments, grid=grid, warmup=True, **options)
            made.append(kernel)

        return launch

    is_small = SHARED_BYTES[architecture] < kernel_jit.MIN_LARGE_SHARED_BYTES
    for module in (attention, latent_attention):
        monkeypatch.setattr(module, "has_small_shared_memory", lambda device: is_small)
    monkeypatch.setattr(jit.JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(driver, "_active", fake_driver(architecture))
    call()
    assert made
    for kernel in made:
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"][:4] == b"\x7fELF" and kernel.metadata.shared <= SHARED_BYTES[architecture]
        assert f".target sm_{architecture}" in ptx
        assert ("griddepcontrol" in ptx) == (architecture >= 90) and kernel.metadata.launch_pdl == (architecture >= 90)


@pytest.mark.parametrize("architecture", [each for each in SHARED_BYTES if each != 90])
@pytest.mark.parametrize("module", [sample, uw12], ids=["sample", "uw12"])
def test_sampling_and_unpacking_compile(module: Any, architecture: int) -> None:
    try:
        nvrtc.compiler_version()
    except nvrtc.KernelCompileError as missing:
        pytest.skip(str(missing))
    options = (*nvrtc.compiler_options(f"sm_{architecture}"), "--Ofast-compile=max")
    assert nvrtc.compile_cached(module.FILE, module.VARIANTS, options).code[:4] == b"\x7fELF"


def test_syntax_trees_are_made_one_at_a_time() -> None:
    """Two threads that make syntax trees can end with a SystemError, up to Python 3.12."""
    active, most = 0, 0

    def parse(_: object) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.01)
        active -= 1

    parse_alone = kernel_jit._parse_one_at_a_time(parse)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(parse_alone, range(8)))
    assert most == 1 and jit.JITFunction.parse.__qualname__ == parse_alone.__qualname__
