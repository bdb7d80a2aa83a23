"""Ops of a mixture of experts in parts, for ranks that compute experts for the rows of other ranks."""

from __future__ import annotations

from torch import Tensor

from emberline.kernels.backend import backend_of
from emberline.kernels.mixture import Mixture, OwnSums, SelectedExperts


def select_experts(x: Tensor, mixture: Mixture) -> SelectedExperts:
    """Norm the rows of x, and select the experts of each row, of those of all ranks."""
    return backend_of(x).select_experts(x, mixture)


def run_experts(x: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
    """Return the output of one expert for each row of x, which is normed.

    `experts`: int32 [rows], indexes into the experts that this rank has."""
    return backend_of(x).run_experts(x, experts, mixture)


def add_shared_expert(out: Tensor, normed: Tensor, mixture: Mixture) -> Tensor:
    """Add the output of the shared expert for normed rows to `out` in place and return that."""
    return backend_of(out).add_shared_expert(out, normed, mixture)


def sum_own_experts(x: Tensor, mixture: Mixture) -> OwnSums:
    """Return what this rank adds to the output of a mixture with slots for the rows x: its experts, and its part of the
    shared expert. The sum of all ranks has the same bits wherever the experts are."""
    return backend_of(x).sum_own_experts(x, mixture)
