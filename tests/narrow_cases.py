"""What products with matrices of narrow codes must do, on any device, compared with `dequantise` in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from expert_cases import ROUTINGS, _activate, _apply
from torch import Tensor
from triton_cases import BF16, F32, assert_close, poisoned, random

from emberline.kernels.mixture import ClampedSwiGLU, Routing
from emberline.kernels.quantise import quantise
from emberline.kernels.quantised_matrix import QuantisedMatrix, dequantise
from emberline.kernels.triton import narrow
from emberline.kernels.triton.experts import RouteRows
from emberline.kernels.triton.routing import SortedRows, route_rows

F64 = torch.float64
# Kind, rows and columns of a group, and more: "zeros", "f16" (scales), "order" (of columns).
FORMATS: dict[str, tuple[Any, int, int, str]] = {
    "int4-32": ("int4", 1, 32, ""),
    "int4-64-zeros": ("int4", 1, 64, "zeros"),
    "int4-128-f16": ("int4", 1, 128, "f16"),
    "int4-128-zeros-f16-order": ("int4", 1, 128, "zeros f16 order"),
    "int4-row": ("int4", 1, 0, ""),
    "mxfp4": ("mxfp4", 1, 0, ""),
    "nvfp4": ("nvfp4", 1, 0, ""),
    "fp8-row": ("fp8", 1, 0, ""),
    "fp8-block": ("fp8", 128, 128, ""),
}


def make_matrix(name: str, *shape: int, device: str) -> QuantisedMatrix:
    """Return a random matrix of a format. Its groups have scales of very different sizes."""
    kind, rows, columns, more = FORMATS[name]
    values = random(*shape, device=device) / shape[-1] ** 0.5
    values = values * torch.exp2(torch.randint(-3, 3, (shape[-1] // 16,), device=device)).repeat_interleave(16)
    matrix = quantise(values, kind, rows, columns)
    if "f16" in more:
        matrix = replace(matrix, scales=(matrix.scales.float() * 1.003).half())
    if "zeros" in more:
        zeros = torch.randint(0, 16, matrix.scales.shape, device=device, dtype=torch.uint8)
        matrix = replace(matrix, zeros=zeros)
    if "order" in more:
        matrix = replace(matrix, columns=torch.randperm(shape[-1], device=device))
    if kind == "nvfp4":
        assert matrix.row_scale is not None
        matrix = replace(matrix, row_scale=matrix.row_scale * (1 + torch.rand_like(matrix.row_scale)))
    return matrix


def check_multiply(device: str, name: str, rows: int, n: int, k: int, multiply: Callable[..., Tensor]) -> None:
    """Check a product and its epilogues. `multiply` has the arguments of `triton.narrow.multiply`."""
    case = DenseCase.make(device, name, rows, n, k)
    x, values, bias, residual = case.x, dequantise(case.matrix), case.bias, case.residual
    wide, total, inner = case.multiply(multiply)
    exact = F.linear(x.to(F64), values.to(F64), bias.to(F64))
    near = F.linear(x.float(), values, bias)
    assert_near(wide, near, exact, name)
    assert_near(total, (near + residual.float()).to(BF16), exact + residual.to(F64), name)
    gate, up = F.linear(x.to(F64), values.to(F64)).chunk(2, dim=1)
    exact = F.silu(gate) * up
    assert_near(inner, exact.to(BF16), exact, name)


@dataclass(frozen=True, slots=True)
class DenseCase:
    matrix: QuantisedMatrix
    x: Tensor
    bias: Tensor
    residual: Tensor

    @staticmethod
    def make(device: str, name: str, rows: int, n: int, k: int) -> DenseCase:
        matrix, x = make_matrix(name, n, k, device=device), random(rows, k, device=device, dtype=BF16)
        return DenseCase(matrix, x, random(n, device=device), random(rows, n, device=device, dtype=BF16))

    def multiply(self, multiply: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product with the bias in float32, the same added to the residual, and the activated one."""
        (rows, n), device = self.residual.shape, str(self.x.device)
        wide = multiply(self.x, self.matrix, poisoned(rows, n, device=device), bias=self.bias)
        total = self.residual.clone()
        assert multiply(self.x, self.matrix, total, bias=self.bias, residual=total) is total
        inner = poisoned(rows, n // 2, device=device, dtype=BF16)
        multiply(self.x, self.matrix, inner, gated=True)
        return wide, total, inner


def check_dequantised(device: str, name: str, n: int, k: int, *, pdl: bool = False) -> None:
    matrix, out = make_matrix(name, n, k, device=device), poisoned(n, k, device=device, dtype=BF16)
    values = dequantise(matrix)
    ordered = values if matrix.columns is None else values[:, matrix.columns]
    torch.testing.assert_close(narrow.dequantise_rows(matrix, out, pdl=pdl), ordered.to(BF16), rtol=0, atol=0)


def assert_near(ours: Tensor, expected: Tensor, exact: Tensor, name: str) -> None:
    """Assert that errors are those of rounding the output, and of rounding weights where a scale covers few columns."""
    if FORMATS[name][:3] != ("int4", 1, 32):
        return assert_close(ours, expected.to(ours.dtype), exact)
    error = (ours.to(F64) - exact).norm() / exact.norm()
    assert error < 4e-3
    return None


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """Random rows that are sorted by their experts, and the matrices of these."""

    routing: Routing
    rows: SortedRows
    x: Tensor
    gate_up: QuantisedMatrix
    down: QuantisedMatrix
    biases: tuple[Tensor | None, Tensor | None]
    clamp: ClampedSwiGLU | None
    pdl: bool

    @staticmethod
    def make(
        device: str,
        name: str,
        routing_name: str,
        rows: int,
        sizes: tuple[int, int],
        tile_rows: int,
        *,
        clamp: ClampedSwiGLU | None = None,
        pdl: bool = False,
        route: RouteRows = route_rows,
    ) -> ExpertCase:
        """`sizes`: of the hidden state and the inner width. With `clamp`, there are biases too."""
        hidden, width = sizes
        case = ROUTINGS[routing_name]
        routing, count = case.make(device), case.experts
        found = route(random(rows, count, device=device), routing, tile_rows, pdl=pdl)
        x = random(rows, hidden, device=device, dtype=BF16)
        gate_up = make_matrix(name, count, 2 * width, hidden, device=device)
        down = make_matrix(name, count, hidden, width, device=device)
        first, second = (None if clamp is None else random(count, n, device=device) for n in (2 * width, hidden))
        return ExpertCase(routing, found, x, gate_up, down, (first, second), clamp, pdl)

    def multiply_gate_up(self, multiply: Callable[..., Tensor]) -> Tensor:
        scaled = self.routing.scales_inputs
        bias, options = self.biases[0], {"clamp": self.clamp, "scaled": scaled, "pdl": self.pdl}
        return multiply(self.x, self.gate_up, self.rows, bias=bias, **options)

    def multiply_down(self, inner: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
        scaled = not self.routing.scales_inputs
        return multiply(inner, self.down, self.rows, bias=self.biases[1], scaled=scaled, pdl=self.pdl)


def check_expert_products(
    device: str,
    name: str,
    routing_name: str,
    rows: int,
    sizes: tuple[int, int],
    tile_rows: int,
    multiply_gate_up: Callable[..., Tensor],
    multiply_down: Callable[..., Tensor],
    **options: Any,
) -> None:
    """Check both products of experts. `options`: of ExpertCase.make.

    The functions have the arguments of those in `triton.narrow`, but the tile.
    """
    case = ExpertCase.make(device, name, routing_name, rows, sizes, tile_rows, **options)
    found, scaled = case.rows, case.routing.scales_inputs
    inner = case.multiply_gate_up(multiply_gate_up)
    experts, weights = found.chosen.long(), found.weights[:, None]
    each = case.x.repeat_interleave(case.routing.experts_per_row, 0).to(F64) * (weights.to(F64) if scaled else 1)
    exact = _activate(each, dequantise(case.gate_up).to(F64), case.biases[0], experts, case.clamp)
    assert_near(inner, exact.to(BF16), exact, name)
    outputs = case.multiply_down(inner, multiply_down)
    exact = _apply(inner.to(F64), dequantise(case.down).to(F64), case.biases[1], experts)
    exact = exact * (1 if scaled else weights.to(F64))
    assert_near(outputs, exact.to(BF16), exact, name)


__all__ = ["BF16", "F32"]
