"""Products by cuBLAS: all usable algorithms give the same bits, and measured choices are cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_settings import needs_hopper_kernels
from torch import Tensor

from emberline.kernels import ops, tuning
from emberline.kernels.cuda import cublas
from emberline.kernels.cuda.cublas import Matmul, MatmulProblem, ProductKind
from emberline.kernels.portable_backend import PortableBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(896, 4096, 14336), (448, 28672, 4096), (1536, 6144, 4096), (300, 256, 8192), (300, 192, 128)]


def random_operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(m + n)
    return torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()


def error(got: Tensor, x: Tensor, w: Tensor) -> float:
    return float((got.float() - x.float() @ w.float().t()).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_usable_proposals_give_the_same_bits(shape: tuple[int, int, int]) -> None:
    """Tuning must affect only the speed.

    For the sizes of layers all proposals qualify: they differ only in their tiles, and sum over k in order. For small
    products some proposals split k.
    """
    x, w = random_operands(*shape)
    matmul = Matmul(MatmulProblem(*shape))
    outs = [matmul(x, w, x.new_empty(shape[0], shape[1]), i) for i in range(len(matmul))]
    assert len(matmul) > 1 or shape[0] == 300
    assert error(outs[0], x, w) <= 2 * error(torch.nn.functional.linear(x, w), x, w)
    same = [i for i, out in enumerate(outs) if torch.equal(out, outs[0])]
    assert tuning.find_bitwise_equal_proposals(matmul, x, w) == same
    assert shape[0] == 300 or len(same) == len(matmul)


def test_product_is_added_to_the_output() -> None:
    x, w = random_operands(512, 256, 1024)
    there = torch.randn(512, 256, device="cuda").bfloat16()
    got = cublas.multiply(x, w, out=there.clone(), kind=ProductKind.ADD)
    torch.testing.assert_close(got, (there.float() + x.float() @ w.float().t()).bfloat16(), atol=0.02, rtol=0.02)


def test_product_in_a_cuda_graph() -> None:
    x, w = random_operands(512, 256, 1024)
    out = torch.zeros(512, 256, device="cuda", dtype=torch.bfloat16)
    expected = cublas.multiply(x, w, out=torch.empty_like(out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cublas.multiply(x, w, out=out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@needs_hopper_kernels
def test_measured_choices_are_cached_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "kernel_dir", lambda: tmp_path)
    monkeypatch.setattr(cublas, "choices", {})
    monkeypatch.setattr(tuning, "MIN_PRODUCT_FLOP", 0.0)
    store, gated = (ops.pack_linear(torch.zeros(n, 256, device="cuda").bfloat16(), gated=n == 512) for n in (384, 512))
    add = ops.pack_linear(torch.zeros(256, 512, device="cuda").bfloat16())
    tuning.tune_products([store, gated, add], 256, [64, 384, 1024])
    (file,) = tmp_path.glob("products-*.json")
    found = tuning._load_choices(file)
    assert {(p.m, p.n, p.kind) for p in found} == {
        (m, n, kind)
        for m in (384, 1024)
        for n, kind in ((384, ProductKind.STORE), (512, ProductKind.GATED), (256, ProductKind.ADD))
    }
    assert cublas.choices == found
    monkeypatch.setattr(tuning, "_measure", lambda problems, *, portable: pytest.fail("the choice is cached"))
    monkeypatch.setattr(cublas, "choices", {})
    tuning.tune_products([store, gated, add], 256, [384])
    assert cublas.choices == found


def test_portable_kernel_for_few_rows_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "kernel_dir", lambda: tmp_path)
    monkeypatch.setattr(cublas, "choices", {})
    monkeypatch.setattr(tuning, "MIN_PORTABLE_FLOP", 0.0)
    weights = [torch.zeros(n, 256, device="cuda").bfloat16() for n in (256, 384, 512)]
    packed = [PortableBackend().pack_linear(w, gated=len(w) == 512) for w in weights]
    timed: list[int] = []
    time_calls = tuning._time_calls
    monkeypatch.setattr(tuning, "_time_calls", lambda calls, w: (timed.append(len(calls)), time_calls(calls, w))[1])
    tuning.tune_products(packed, 256, [16, 32, 128], portable=True)
    kinds = {256: ProductKind.ADD, 384: ProductKind.STORE, 512: ProductKind.GATED}
    assert cublas.choices.keys() == {MatmulProblem(m, n, 256, kind) for m in (32, 128) for n, kind in kinds.items()}
    assert all(choice >= 0 for problem, choice in cublas.choices.items() if problem.m == 128)
    assert len(timed) == 6 and max(timed) > 1
