"""The portable backend's products are close to those of the dequantised weights, with every form and epilogue."""

from __future__ import annotations

import narrow_cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.arguments import LinearLayer, LinearOutput
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.portable_backend import PortableBackend
from emberline.kernels.quantised_matrix import dequantise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, N, K = torch.bfloat16, 1024, 512
FORMS = ("plain", "uw12", *narrow_cases.FORMATS)
MAX_ERROR = 6e-3  # relative: inputs and results are bf16, and so are dequantised weights of some formats


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_weight(backend: PortableBackend, form: str, *, gated: bool = False) -> tuple[PackedWeight, Tensor]:
    """Return the weight in a form, and its values; a gated one has the rows of gate before those of up."""
    if form in narrow_cases.FORMATS:
        matrix = narrow_cases.make_matrix(form, N, K, device="cuda")
        weight = backend.pack_quantised(matrix, gated=gated)
        assert weight.layout is WeightLayout.QUANTISED and backend.keeps_quantised(matrix)
        return weight, dequantise(matrix).double()
    values = torch.randn(N, K, device="cuda").mul_(0.05).to(BF16)
    rows = backend.arrange_gate_rows(values) if gated else values
    weight = backend.pack_linear(rows, gated=gated)
    if form == "uw12":
        backend.fill_weight(weight, rows)
        assert weight.layout is WeightLayout.UW12
    return weight, values.double()


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.isfinite().all() and (ours.double() - exact).norm() <= MAX_ERROR * exact.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [1, 40, 200])
def test_products(form: str, m: int) -> None:
    backend, x = PortableBackend(), torch.randn(m, K, device="cuda").to(BF16)
    weight, values = make_weight(backend, form)
    bias, norm = torch.randn(N, device="cuda"), torch.rand(K, device="cuda")
    exact = x.double() @ values.t()
    assert_near(backend.linear(x, LinearLayer(weight, bias), LinearOutput()), exact + bias)
    residual = torch.randn(m, N, device="cuda").to(BF16)
    target = residual.clone()
    assert backend.linear(x, LinearLayer(weight), LinearOutput(add_to=target)) is target
    assert_near(target, exact + residual.double())
    scores = backend.linear(x, LinearLayer(weight), LinearOutput(float32=True))
    assert scores.dtype is torch.float32
    assert_near(scores, exact)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm
    assert_near(backend.linear(x, LinearLayer(weight, None, norm, 1e-5), LinearOutput()), normed @ values.t())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [1, 40, 200])
def test_gated_products(form: str, m: int) -> None:
    backend, x = PortableBackend(), torch.randn(m, K, device="cuda").to(BF16)
    weight, values = make_weight(backend, form, gated=True)
    gate, up = (x.double() @ values.t()).chunk(2, dim=1)
    assert_near(backend.gate_up_silu(x, LinearLayer(weight)), F.silu(gate) * up)
    assert_near(backend.gate_up_gelu(x, LinearLayer(weight)), F.gelu(gate, approximate="tanh") * up)
