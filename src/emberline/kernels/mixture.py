"""Mixture: the weights of a mixture-of-experts feed-forward network.

Each row uses the experts that score highest. A row's result depends on that row only. The weights of experts that no
row selects are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

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

    @cached_property
    def native(self) -> NativeMixture:
        """The C struct that describes this mixture to the native library."""
        experts = (NativeExpert * len(self.experts))(*(expert.native for expert in self.experts))
        router, first = self.router, self.experts[0]
        sizes = len(experts), self.experts_per_row, self.renormalize, router.k, first.down.k
        return NativeMixture(experts, router.ptr, self.norm.data_ptr(), router.layout, *sizes, self.eps)
