"""The steps of a mixture of experts as separate ops, for ranks that compute experts for rows of other ranks."""

from __future__ import annotations

from torch import Tensor

from emberline.kernels.backend import backend_of
from emberline.kernels.mixture import LocalExpertSums, Mixture, SelectedExperts


def select_experts(x: Tensor, mixture: Mixture) -> SelectedExperts:
    """Norm the rows of x, and select the experts of each row among the experts of all ranks."""
    return backend_of(x).select_experts(x, mixture)


def run_experts(x: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
    """Return the output of one given expert for each row of x. The rows are already normed.

    `experts`: int32 [rows], the index of each row's expert among the experts of this rank."""
    return backend_of(x).run_experts(x, experts, mixture)


def add_shared_expert(out: Tensor, normed: Tensor, mixture: Mixture) -> Tensor:
    """Add the output of the shared expert for the rows `normed` to `out` in place, and return `out`."""
    return backend_of(out).add_shared_expert(out, normed, mixture)


def sum_local_experts(x: Tensor, mixture: Mixture) -> LocalExpertSums:
    """Return this rank's share of a mixture's output for the rows x, if experts are in slots (see ExpertSlots).

    It is the sum of the selected experts that this rank computes, and of its part of the shared expert. The sum over
    all ranks has the same bits wherever the experts are."""
    return backend_of(x).sum_local_experts(x, mixture)
