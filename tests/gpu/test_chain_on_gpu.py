"""All products of a decoder layer in one kernel: the sums of single products, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_settings import needs_hopper_kernels
from narrow_cases import make_matrix

from emberline.kernels.arguments import LayerProducts, LinearLayer, LinearOutput
from emberline.kernels.cuda import chain
from emberline.kernels.cuda.hopper_backend import HopperBackend

pytestmark = needs_hopper_kernels

GPU, BF16, EPS = "cuda", torch.bfloat16, 1e-5
FORMATS = ("int4-128-f16", "int4-32", "int4-64-zeros", "mxfp4", "nvfp4")
SIZES = ((512, 1536, 768), (4096, 14336, 6144))  # hidden, feed-forward network, queries with keys and values


@pytest.fixture(scope="module", autouse=True)
def stream() -> Iterator[torch.cuda.Stream]:
    """The only stream of this process that has chains."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_products(name: str, sizes: tuple[int, int, int], *, biased: bool = True) -> LayerProducts:
    hidden, ffn, qkv = sizes
    backend = HopperBackend()

    def make(n: int, k: int, *, gated: bool = False, normed: bool = False) -> LinearLayer:
        weight = backend.pack_quantised(make_matrix(name, n, k, device=GPU), gated=gated)
        norm = torch.rand(k, device=GPU) + 0.5 if normed else None
        return LinearLayer(weight, torch.randn(n, device=GPU) if biased and not gated else None, norm, EPS)

    return LayerProducts(
        make(hidden, hidden), make(2 * ffn, hidden, gated=True, normed=True), make(hidden, ffn),
        make(qkv, hidden, normed=True),
    )  # fmt: skip


def run_one_by_one(mixed: torch.Tensor, x: torch.Tensor, products: LayerProducts) -> torch.Tensor:
    backend = HopperBackend()
    backend.linear(mixed, products.o, LinearOutput(add_to=x))
    backend.linear(backend.gate_up_silu(x, products.gate_up), products.down, LinearOutput(add_to=x))
    return backend.linear(x, products.qkv, LinearOutput())


def draw(rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    mixed, x = (torch.randn(rows, hidden, device=GPU).to(BF16) for _ in range(2))
    return mixed, x


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FORMATS)
def test_sums_and_bits(name: str, sizes: tuple[int, int, int]) -> None:
    """The sums of single products but for rounding; the same bits in each run, and for a row by itself."""
    products, backend = make_products(name, sizes), HopperBackend()
    for rows in (1, 2):
        mixed, x = draw(rows, sizes[0])
        ours, theirs = x.clone(), x.clone()
        qkv = backend.run_layer_products(mixed, ours, products)
        assert qkv is not None
        expected = run_one_by_one(mixed, theirs, products)
        assert difference(ours, theirs) < 6e-3 and difference(qkv, expected) < 6e-3
        for _ in range(20):
            again = x.clone()
            assert torch.equal(backend.run_layer_products(mixed, again, products), qkv) and torch.equal(again, ours)
        alone = x[-1:].clone()
        assert torch.equal(backend.run_layer_products(mixed[-1:].contiguous(), alone, products), qkv[-1:])
        assert torch.equal(alone, ours[-1:])


def test_captured_layers(stream: torch.cuda.Stream) -> None:
    """Layer after layer in a graph, with other kernels between them that start early and read what they write."""
    layers, backend = [make_products(FORMATS[0], SIZES[0], biased=False) for _ in range(3)], HopperBackend()
    hidden = SIZES[0][0]

    def run(x: torch.Tensor) -> torch.Tensor:
        mixed = x.clone()
        for each in layers:
            qkv = backend.run_layer_products(mixed, x, each)
            assert qkv is not None
            mixed = backend.rms_norm(qkv[:, :hidden], each.qkv.norm, EPS, torch.empty_like(x))
        return mixed

    inputs = [torch.randn(2, hidden, device=GPU).to(BF16) for _ in range(20)]
    expected = [run(x.clone()) for x in inputs]
    state, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run(state)
    for x, wanted in zip(inputs, expected, strict=True):
        state.copy_(x)
        graph.replay()
        assert torch.equal(out, wanted)


def test_what_has_no_kernel() -> None:
    """Nothing is changed."""
    backend, products = HopperBackend(), make_products(FORMATS[0], SIZES[0])
    mixed, x = draw(chain.MAX_ROWS + 1, SIZES[0][0])
    before = x.clone()
    assert backend.run_layer_products(mixed, x, products) is None
    plain = LinearLayer(backend.pack_linear(torch.randn(512, 512, device=GPU).to(BF16)))
    assert backend.run_layer_products(mixed[:1], x[:1], products._replace(o=plain)) is None
    other = make_products("mxfp4", SIZES[0]).down
    assert backend.run_layer_products(mixed[:1], x[:1], products._replace(down=other)) is None
    with torch.cuda.stream(torch.cuda.Stream()):
        assert backend.run_layer_products(mixed[:1], x[:1], products) is None, "another stream has chains"
    assert torch.equal(x, before)
