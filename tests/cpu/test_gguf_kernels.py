"""Products with GGUF blocks are exact but for the rounding of inputs to int8, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from gguf_block_cases import exact_product, random_blocks, round_inputs
from native_backend import native_backend
from torch import Tensor
from torch.nn.functional import gelu, silu

from emberline.kernels import ops
from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.gguf_blocks import BLOCK_FORMATS, DamagedBlocks, UnsupportedBlocks, dequantise_blocks
from emberline.kernels.mixture import Expert, Mixture, Routing
from emberline.kernels.reference import ReferenceBackend, rms_norm

REFERENCE = ReferenceBackend()
TYPES = sorted(BLOCK_FORMATS)
MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")  # have a second float16
FLOAT32_ERROR = 2e-6  # of the sum of the sizes of the terms: 32 roundings of 2^-24


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    with native_backend():
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def width(type_name: str) -> int:
    return 768 if type_name.endswith("_K") else 576


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("m", [1, 3, 7, 41])
def test_linear_matches_exact_product(type_name: str, m: int) -> None:
    n, k = 83, width(type_name)
    blocks, x, bias = random_blocks(type_name, n, k), torch.randn(m, k), torch.randn(n)
    x[0, :32] = 0
    layer = LinearLayer(ops.pack_gguf(blocks, type_name, k), bias)
    y = ops.linear(x, layer)
    assert torch.equal(ops.linear(x, layer, add_to=torch.ones(m, n)), y + 1)
    exact, sizes = exact_product(x, blocks, type_name)
    assert ((y.double() - exact - bias).abs() <= FLOAT32_ERROR * (sizes + bias.abs())).all()


def test_small_inputs_are_not_rounded_to_zero() -> None:
    blocks, x = random_blocks("Q4_1", 16, 64), torch.randn(2, 64) * torch.tensor([[1e-5], [1e-25]])
    y = ops.linear(x, LinearLayer(ops.pack_gguf(blocks, "Q4_1", 64)))
    exact, sizes = exact_product(x, blocks, "Q4_1")
    assert ((y.double() - exact).abs() <= FLOAT32_ERROR * sizes).all() and sizes.min() > 0
    assert torch.equal(ops.linear(x * 1e-15, LinearLayer(ops.pack_gguf(blocks, "Q4_1", 64)))[1], torch.zeros(16))


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_do_not_depend_on_batch_or_threads(type_name: str) -> None:
    n, k = 49, 4 * width(type_name)  # more blocks than are unpacked at once
    layer, x = LinearLayer(ops.pack_gguf(random_blocks(type_name, n, k), type_name, k)), torch.randn(33, k)
    whole = ops.linear(x, layer)
    for threads in (1, 2):
        ops.set_threads(threads)
        for m in (1, 2, 3, 4, 5, 8, 9, 12, 17, 32, 33):
            assert torch.equal(ops.linear(x[33 - m :], layer), whole[33 - m :])


@pytest.mark.parametrize("type_name", TYPES)
def test_embed_is_bit_exact(type_name: str) -> None:
    n, k = 40, width(type_name)
    blocks, ids = random_blocks(type_name, n, k), torch.tensor([39, 0, 17, 17, 5, *range(40)])
    table = ops.pack_gguf(blocks, type_name, k)
    assert torch.equal(ops.embed(ids, table), dequantise_blocks(blocks, type_name, k)[ids])


def test_smallest_mxfp4_scales() -> None:
    blocks = random_blocks("MXFP4", 4, 32)
    blocks[:, 0] = torch.tensor([0, 1, 2, 250])
    table = ops.pack_gguf(blocks, "MXFP4", 32)
    assert torch.equal(ops.embed(torch.arange(4), table), dequantise_blocks(blocks, "MXFP4", 32))


@pytest.mark.parametrize("type_name", TYPES)
def test_memory_is_that_of_the_file(type_name: str) -> None:
    blocks = random_blocks(type_name, 64, 768)
    assert ops.pack_gguf(blocks, type_name, 768).data.nbytes <= blocks.nbytes * 1.06


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("m", [1, 20])
def test_gated_products(type_name: str, m: int) -> None:
    n, k = 2 * 37, width(type_name)
    blocks, x = random_blocks(type_name, n, k), torch.randn(m, k)
    layer = LinearLayer(ops.pack_gguf(blocks, type_name, k, gated=True), norm=torch.rand(k) + 0.5, eps=1e-5)
    assert layer.norm is not None
    normed = rms_norm(x, layer.norm, layer.eps)
    gate, up = exact_product(normed, blocks, type_name)[0].chunk(2, dim=1)
    error = 3e-3 * up.abs().max() * gate.abs().max()  # a norm rounded differently changes single codes of inputs
    assert (ops.gate_up_silu(x, layer) - silu(gate) * up).abs().max() <= error
    assert (ops.gate_up_gelu(x, layer) - gelu(gate, approximate="tanh") * up).abs().max() <= error


def test_whole_range_of_codes() -> None:
    """The largest codes times the largest inputs do not overflow in the sums of any instruction."""
    for type_name in TYPES:
        k = width(type_name)
        blocks = random_blocks(type_name, 16, k)
        x = torch.ones(5, k) * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None]
        extreme = torch.where(dequantise_blocks(blocks, type_name, k)[3] > 0, 1.0, -1.0)
        x[2:] *= extreme
        y = ops.linear(x, LinearLayer(ops.pack_gguf(blocks, type_name, k)))
        exact, sizes = exact_product(x, blocks, type_name)
        assert ((y.double() - exact).abs() <= FLOAT32_ERROR * sizes).all(), type_name
    codes = torch.full((16, 34), 0x80, dtype=torch.uint8)
    codes[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    y = ops.linear(torch.full((5, 32), -1.0), LinearLayer(ops.pack_gguf(codes, "Q8_0", 32)))
    assert torch.equal(y, torch.full((5, 16), 4096.0))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poisoned_input_poisons_only_its_row(poison: float) -> None:
    layer, x = LinearLayer(ops.pack_gguf(random_blocks("Q4_0", 32, 64), "Q4_0", 64)), torch.randn(6, 64)
    clean = ops.linear(x, layer)
    x[2, 40] = poison
    y = ops.linear(x, layer)
    assert not y[2].isfinite().any() and torch.equal(y[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


def make_mixture(backend: ReferenceBackend, router: Tensor) -> Mixture:
    hidden, ffn = 64, 96
    experts = tuple(
        Expert(
            backend.pack_gguf(random_blocks("Q4_1", 2 * ffn, hidden, seed), "Q4_1", hidden, gated=True),
            backend.pack_gguf(random_blocks("Q8_0", hidden, ffn, seed), "Q8_0", ffn),
        )
        for seed in range(4)
    )
    return Mixture(torch.ones(hidden), 1e-5, backend.pack_linear(router), experts, Routing(2))


def test_mixture_of_quantised_experts() -> None:
    router, x = torch.randn(4, 64), torch.randn(9, 64)
    backend = ops.current_backend()
    ours = backend.run_mixture(x.clone(), make_mixture(backend, router)) - x
    expected = REFERENCE.run_mixture(x.clone(), make_mixture(REFERENCE, router)) - x
    assert (ours - expected).abs().max() <= 0.02 * expected.abs().max()
    alone = backend.run_mixture(x[4:5].clone(), make_mixture(backend, router)) - x[4:5]
    assert torch.equal(alone[0], ours[4])


def test_reference_backend_dequantises() -> None:
    blocks, x = random_blocks("Q5_0", 8, 64), torch.randn(3, 64)
    y = REFERENCE.linear(x, LinearLayer(REFERENCE.pack_gguf(blocks, "Q5_0", 64)), LinearOutput())
    torch.testing.assert_close(y, x @ dequantise_blocks(blocks, "Q5_0", 64).T)
    assert (round_inputs(x) - x).abs().max() <= x.abs().max() / 254 * 1.001


@pytest.mark.parametrize(
    ("type_name", "k", "named"), [("Q2_K", 256, "Q2_K"), ("Q4_K", 576, "576"), ("Q4_0", 48, "48"), ("Q4_0", 64, "36")]
)
def test_unsupported_blocks_are_refused(type_name: str, k: int, named: str) -> None:
    with pytest.raises(UnsupportedBlocks, match=named):
        ops.pack_gguf(torch.zeros(2, 37, dtype=torch.uint8), type_name, k)


@pytest.mark.parametrize("type_name", TYPES)
def test_scales_that_are_no_numbers_are_refused(type_name: str) -> None:
    """Every float16 of a block is checked, in the first and in the last row."""
    k, size = width(type_name), BLOCK_FORMATS[type_name].file_bytes
    places = {"Q6_K": [208], "MXFP4": [0]}.get(type_name, [0, 2] if type_name in MINIMA else [0])
    for row, place in product((0, 36), places):
        blocks = random_blocks(type_name, 37, k)
        last = blocks[row, -size:]
        last[place : place + 2] = torch.tensor([255, 0] if type_name == "MXFP4" else [0, 0x7C], dtype=torch.uint8)
        with pytest.raises(DamagedBlocks, match=f"{type_name} has a scale"):
            ops.pack_gguf(blocks, type_name, k)
