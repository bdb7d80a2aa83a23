"""Helpers of linear layer tests: inputs, outputs filled with NaN, and the accepted error."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels.cuda.linear import BF16Weight

BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def heavy(n: int, k: int) -> Tensor:
    """Return weights like a trained layer's: heavier tails than a normal distribution, rows of different scale."""
    tails = torch.randn(n, k, 5, device="cuda").square().mean(-1).sqrt() if n * k < 1 << 24 else 1.0
    rows = torch.exp2(torch.randint(-2, 3, (n, 1), device="cuda"))
    return (torch.randn(n, k, device="cuda") / tails * rows * 0.5 * k**-0.5).to(BF16)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


def weight(n: int, k: int) -> BF16Weight:
    return BF16Weight(random(n, k, scale=k**-0.5))


def assert_close(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Assert that the error is at most twice that of torch, in the worst element and on average."""
    floor = 1e-6 * exact.abs().max().item()
    for norm in (torch.max, torch.mean):
        mine, other = (norm((y.double() - exact).abs()).item() for y in (ours, theirs))
        assert mine <= 2 * other + floor, f"{norm.__name__}: ours {mine:.3e}, torch {other:.3e}"
