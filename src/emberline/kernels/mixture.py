"""Mixture: a mixture-of-experts feed-forward network; each row uses its top-scored experts.

A row's result depends on that row only. The weights of experts that no row selects are not read.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from emberline.kernels import ops, ref
from emberline.kernels.cpu.library import NativeExpert, NativeMixture
from emberline.kernels.packed_weight import PackedWeight


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
    experts_per_row: int  # experts that each row uses
    renormalize: bool  # whether the weights of these experts are scaled to sum to 1

    def __call__(self, x: Tensor) -> Tensor:
        """Add the network's output to x in place and return x."""
        if self.router.layout < 0:
            return run_reference(self, x)
        library = ops.current_backend().library
        assert library is not None and x.is_contiguous() and x.shape[1] == self.router.k
        library.ember_mixture(ctypes.byref(self._native), len(x), x.data_ptr())
        return x

    @cached_property
    def _native(self) -> NativeMixture:
        experts = (NativeExpert * len(self.experts))(*(expert.native for expert in self.experts))
        router, first = self.router, self.experts[0]
        sizes = len(experts), self.experts_per_row, self.renormalize, router.k, first.down.k
        return NativeMixture(experts, router.ptr, self.norm.data_ptr(), router.layout, *sizes, self.eps)


def run_reference(mixture: Mixture, x: Tensor) -> Tensor:
    """Compute the mixture in plain torch. Among equally probable experts the first is used."""
    normed = ref.rms_norm(x, mixture.norm, mixture.eps)
    probabilities = ref.linear(normed, mixture.router).softmax(-1)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    shares, chosen = ordered[:, : mixture.experts_per_row], order[:, : mixture.experts_per_row]
    if mixture.renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    for number, expert in enumerate(mixture.experts):
        rows, ranks = (chosen == number).nonzero(as_tuple=True)
        if len(rows):
            y = ref.linear(ref.gate_up_silu(normed[rows], expert.gate_up), expert.down)
            x[rows] += shares[rows, ranks, None] * y
    return x
