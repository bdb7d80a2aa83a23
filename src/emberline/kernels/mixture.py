"""Mixture: a feed-forward network of experts, of which each row goes through the few that its router prefers.

As everywhere, a row's result depends on nothing but the row; and an expert that nobody prefers is not read.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from emberline.kernels import ops, ref
from emberline.kernels.cpu.library import NativeExpert, NativeMixture
from emberline.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: PackedWeight
    down: PackedWeight

    @property
    def native(self) -> NativeExpert:
        return NativeExpert(self.gate_up.ptr, self.down.ptr, self.gate_up.layout, self.down.layout)


@dataclass(frozen=True, eq=False)
class Mixture:
    norm: Tensor
    eps: float
    router: PackedWeight
    experts: tuple[Expert, ...]
    chosen: int  # experts of a row
    renormalised: bool  # whether their shares sum up to 1, or are what the router gave them among all

    def __call__(self, x: Tensor) -> Tensor:
        """Adds to x in place."""
        if self.router.layout < 0:
            return reference(self, x)
        library = ops.describe().library
        assert library is not None and x.is_contiguous() and x.shape[1] == self.router.k
        library.ember_mixture(ctypes.byref(self._native), len(x), x.data_ptr())
        return x

    @cached_property
    def _native(self) -> NativeMixture:
        experts = (NativeExpert * len(self.experts))(*(expert.native for expert in self.experts))
        router, first = self.router, self.experts[0]
        sizes = len(experts), self.chosen, self.renormalised, router.k, first.down.k
        return NativeMixture(experts, router.ptr, self.norm.data_ptr(), router.layout, *sizes, self.eps)


def reference(mixture: Mixture, x: Tensor) -> Tensor:
    """In plain torch. Probabilities are of all experts; among equals the first is preferred."""
    normed = ref.rms_norm(x, mixture.norm, mixture.eps)
    probabilities = ref.linear(normed, mixture.router).softmax(-1)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    shares, chosen = ordered[:, : mixture.chosen], order[:, : mixture.chosen]
    if mixture.renormalised:
        shares = shares / shares.sum(-1, keepdim=True)
    for number, expert in enumerate(mixture.experts):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        if len(rows):
            y = ref.linear(ref.gate_up_silu(normed[rows], expert.gate_up), expert.down)
            x[rows] += shares[rows, places, None] * y
    return x
