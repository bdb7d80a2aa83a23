"""Checks that several kernels of linear layers must pass. Each check takes the kernel's `linear` function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from gated_weights import interleaved
from linear_cases import assert_close, poisoned, random, weight
from torch import Tensor

from emberline.kernels.cuda.linear import BF16Weight

BF16, F32 = torch.bfloat16, torch.float32
DECODER_SIZES = ((6144, 4096), (4096, 4096), (8192, 4096), (4096, 4096))  # (n, k) of qkv, o, gate and up, down

LinearKernel = Callable[..., Tensor]
W = TypeVar("W")


def run_linear(
    linear: LinearKernel, x: Tensor, w: Any, *, dtype: torch.dtype = BF16, plan: Any = None, pdl: bool = False
) -> Tensor:
    return linear(x, w, out=poisoned(len(x), w.n, dtype=dtype), plan=plan, pdl=pdl)


def check_store(linear: LinearKernel, m: int, k: int, n: int) -> None:
    """Check that float32 results are close to exact sums, and that bf16 results are their roundings."""
    x, w = random(m, k), weight(n, k)
    exact = x.double() @ w.data.double().T
    logits = run_linear(linear, x, w, dtype=F32)
    assert_close(logits, torch.mm(x, w.data.T, out_dtype=F32), exact)
    assert_close(run_linear(linear, x, w), F.linear(x, w.data), exact)
    assert torch.equal(run_linear(linear, x, w), logits.to(BF16))


def check_bias_and_residual(linear: LinearKernel, m: int, k: int, n: int) -> None:
    """Check that bias and residual are float32 additions before the single rounding."""
    x, w, bias, residual = random(m, k), weight(n, k), random(n, dtype=F32), random(m, n)
    y = run_linear(linear, x, w, dtype=F32)
    shifted = linear(x, w, out=poisoned(m, n, dtype=F32), bias=bias, pdl=False)
    assert torch.equal(shifted, y + bias)
    assert torch.equal(linear(x, w, out=poisoned(m, n), bias=bias, pdl=False), (y + bias).to(BF16))
    added = linear(x, w, out=poisoned(m, n), residual=residual, pdl=False)
    assert torch.equal(added, (residual.float() + y).to(BF16))
    both = linear(x, w, out=poisoned(m, n), bias=bias, residual=residual, pdl=False)
    assert torch.equal(both, (residual.float() + (y + bias)).to(BF16))
    in_place = residual.clone()
    linear(x, w, out=in_place, residual=in_place, pdl=False)
    assert torch.equal(in_place, added)


def apply_gates(y: Tensor) -> Tensor:
    """Return silu(gate) * up of a product with a gated weight, computed by torch."""
    parts = y.unflatten(1, (-1, 2, 16))
    return (F.silu(parts[:, :, 0]) * parts[:, :, 1]).flatten(1)


def check_gated(linear: LinearKernel, m: int, k: int, half: int) -> None:
    """Check that the result is bitwise equal to the product followed by torch's silu and multiplication."""
    x, gate, up = random(m, k), random(half, k, scale=2 * k**-0.5), random(half, k, scale=k**-0.5)
    bias = random(2 * half, dtype=F32)
    w = BF16Weight(interleaved(gate, up))
    for shift in (None, bias):
        y = linear(x, w, out=poisoned(m, 2 * half), bias=shift, pdl=False)
        ours = linear(x, w, out=poisoned(m, half), bias=shift, gated=True, pdl=False)
        assert torch.equal(ours, apply_gates(y))
    plain = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    theirs = F.silu(F.linear(x, gate)) * F.linear(x, up)
    assert_close(linear(x, w, out=poisoned(m, half), gated=True, pdl=False), theirs, plain)


def check_strided_input_rows(linear: LinearKernel, m: int) -> None:
    """Check that x may be a slice of columns of a wider tensor."""
    w = weight(512, 1024)
    columns = random(m, 3072)[:, 1024:2048]
    assert torch.equal(run_linear(linear, columns, w), run_linear(linear, columns.contiguous(), w))


def check_nan_row(linear: LinearKernel, m: int, n: int) -> None:
    """Check that a row of x with infinite values does not affect the results of other rows."""
    x, w = random(m, 1024), weight(n, 1024)
    clean = run_linear(linear, x, w)
    x[3] = torch.inf
    dirty = run_linear(linear, x, w)
    assert not dirty[3].isfinite().any()
    others = [row for row in range(m) if row != 3]
    assert torch.equal(dirty[others], clean[others])


def make_decoder_weights(make: Callable[[int, int], W]) -> list[tuple[W, ...]]:
    """Return the weights qkv, o, gate and up, and down of four layers, each made by `make(n, k)`."""
    return [tuple(make(n, k) for n, k in DECODER_SIZES) for _ in range(4)]


def run_layers(
    linear: LinearKernel, x: Tensor, weights: Sequence[Sequence[Any]], head: Any = None, *, pdl: bool
) -> Tensor:
    """Run linear layers as a decoder does: each reads the output of the preceding one, and one adds in place."""
    m = len(x)
    hidden = x.clone()
    for qkv, o, gate_up, down in weights:
        mixed = linear(hidden, qkv, out=poisoned(m, qkv.n), pdl=pdl)
        linear(mixed[:, : o.k], o, out=hidden, residual=hidden, pdl=pdl)
        active = linear(hidden, gate_up, out=poisoned(m, gate_up.n // 2), gated=True, pdl=pdl)
        linear(active, down, out=hidden, residual=hidden, pdl=pdl)
    return hidden if head is None else linear(hidden, head, out=poisoned(m, head.n, dtype=F32), pdl=pdl)


def check_dependent_launches(
    linear: LinearKernel,
    x: Tensor,
    weights: Sequence[Sequence[Any]],
    head: Any = None,
    *,
    stream: torch.cuda.Stream | None = None,
) -> Tensor:
    """Check that layers give the same bits when kernels start early, also as a CUDA graph, and return the result.

    The graph is captured on `stream` if given, after the layers have run there once.
    """
    expected = run_layers(linear, x, weights, head, pdl=False)
    assert expected.isfinite().all()
    assert torch.equal(run_layers(linear, x, weights, head, pdl=True), expected)
    if stream is not None:
        with torch.cuda.stream(stream):
            run_layers(linear, x, weights, head, pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run_layers(linear, x, weights, head, pdl=True)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
    return expected
