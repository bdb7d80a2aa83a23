"""The Triton products with narrow codes without a GPU: their results in the interpreter, and that they compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_triton import BF16, compiled, compiled_kernels, interpreted, rounding, seed

pytest.importorskip("triton")

import narrow_cases
from expert_cases import SMALL

from emberline.kernels.mixture import ClampedSwiGLU
from emberline.kernels.quantise import quantise
from emberline.kernels.triton import narrow
from emberline.kernels.triton.grouped import ProductTile

__all__ = ["compiled_kernels", "rounding", "seed"]
CPU = "cpu"


@interpreted
@pytest.mark.parametrize("name", ["int4-32", "int4-64-zeros", "int4-128-zeros-f16-order", "nvfp4", "fp8-row"])
def test_multiply_in_the_interpreter(rounding: None, name: str) -> None:
    k, tile = 256 if "128" in name else 192, (16, ProductTile(32, 64, 4, 2))
    narrow_cases.check_multiply(CPU, name, 5, 24, k, partial(narrow.multiply, tile=tile))
    narrow_cases.check_dequantised(CPU, name, 24, k)


@interpreted
@pytest.mark.parametrize("name", ["mxfp4"])
def test_experts_in_the_interpreter(rounding: None, name: str) -> None:
    products = partial(narrow.multiply_gate_up, tile=SMALL[0]), partial(narrow.multiply_down, tile=SMALL[1])
    clamp = ClampedSwiGLU(1.7, 1.0)
    narrow_cases.check_expert_products(CPU, name, "gpt-oss", 5, (64, 96), 16, *products, clamp=clamp)
    narrow_cases.check_expert_products(CPU, name, "llama4", 3, (64, 96), 16, *products)


def test_groups_that_kernels_cannot_read() -> None:
    values = torch.zeros(16, 96)
    assert narrow.supports(quantise(values, "int4", 1, 32)) and narrow.supports(quantise(values, "int4"))
    assert not narrow.supports(quantise(values, "int4", 1, 48)) and not narrow.supports(quantise(values, "int4", 1, 8))


@compiled
@pytest.mark.parametrize("kind", ["nvfp4"])
def test_products_compile(compiled_kernels: list[Any], kind: Any) -> None:
    matrix = quantise(torch.zeros(64, 256), kind, 1, 128)
    narrow.multiply(torch.zeros(1, 256, dtype=BF16), matrix, torch.zeros(1, 64, dtype=BF16), pdl=True)
    narrow.dequantise_rows(matrix, torch.zeros(64, 256, dtype=BF16), pdl=True)
    products = [kernel.asm["ptx"] for kernel in compiled_kernels if "mma" in kernel.asm["ptx"]]
    assert len(products) == 1 and "cp.async" in products[0]
