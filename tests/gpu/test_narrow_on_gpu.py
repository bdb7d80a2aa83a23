"""Products with matrices of narrow codes on a GPU, compared with `dequantise` in float64."""

from __future__ import annotations

import narrow_cases
import pytest
import torch

from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.triton import experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = "cuda"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", narrow_cases.FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 512, 1024), (20, 96, 256), (50, 576, 2944), (200, 256, 512)])
def test_triton_products(name: str, rows: int, n: int, k: int) -> None:
    narrow_cases.check_multiply(GPU, name, rows, n, k, pdl=True)


@pytest.mark.parametrize("name", ["int4-32", "int4-64-zeros", "mxfp4", "nvfp4", "fp8-block"])
@pytest.mark.parametrize(("rows", "sizes"), [(1, (256, 128)), (40, (384, 256)), (300, (256, 640))])
def test_triton_experts(name: str, rows: int, sizes: tuple[int, int]) -> None:
    tiles = experts.choose_tiles(4 * rows, 6, narrow_cases.BF16)
    products = (tiles.gate_up, tiles.down)
    clamp = ClampedSwiGLU(1.7, 1.0)
    narrow_cases.check_expert_products(GPU, name, "gpt-oss", rows, sizes, tiles.rows, products, clamp=clamp, pdl=True)
    narrow_cases.check_expert_products(GPU, name, "llama4", rows, sizes, tiles.rows, products, pdl=True)
