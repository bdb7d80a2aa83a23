"""Mixture: the weights of a mixture-of-experts feed-forward network, and the rules by which rows select experts.

Each row uses the experts that score highest. A row's result depends on that row only. The weights of experts that no
row selects are not read.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cpu.library import NativeExpert, NativeMixture
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.packed_weight import PackedExperts, PackedWeight

ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How a row selects its experts, and by which weights their outputs are multiplied."""

    experts_per_row: int
    renormalize: bool = False  # whether the weights of the selected experts are scaled to sum to 1
    scores: ScoreFunction = "softmax"
    bias: Tensor | None = None  # added to the router's logits
    correction: Tensor | None = None  # added to the scores for the selection, but not in the weights
    groups: int = 1  # consecutive experts of equal number form a group
    groups_per_row: int = 1  # groups from which a row may select experts
    group_best: int = 1  # a group's score is the sum of this many of its highest scores: 1 or 2
    scale: float = 1.0  # factor of all weights
    scales_inputs: bool = False  # whether the weights multiply the inputs of experts instead of their outputs
    local_experts: range | None = None  # experts that this rank has; None: all. Outputs of others are not added

    @property
    def first_expert(self) -> int:
        return 0 if self.local_experts is None else self.local_experts.start


class SelectedExperts(NamedTuple):
    """The experts that each row selects, and the normed rows, which are the inputs of the experts."""

    normed: Tensor  # [rows, hidden]
    weights: Tensor  # [rows, experts per row] float32
    numbers: Tensor  # [rows, experts per row] int32, ascending in each row


class LocalExpertSums(NamedTuple):
    """What a rank adds to the output of a mixture whose experts may move between ranks."""

    sums: Tensor  # float64 [rows, hidden], of terms that `exact_sums.round_term` rounded
    slots: Tensor  # integers [rows, experts per row]: the slot, on any rank, that computes each expert of a row


@dataclass(frozen=True, slots=True)
class Expert:
    """A gated feed-forward network.

    If `gate_up` is not packed as gated, all rows of gate come before those of up.
    """

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None  # only with a matrix that is not packed as gated
    down_bias: Tensor | None = None

    @property
    def native(self) -> NativeExpert:
        gate_up, down = self.gate_up, self.down
        biases = _address(self.gate_up_bias), _address(self.down_bias)
        return NativeExpert(gate_up.ptr, down.ptr, *biases, gate_up.layout, down.layout, gate_up.gated, down.k)


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """All experts of a layer, stacked in a few tensors, as GPU kernels read them."""

    gate_up: Tensor | PackedExperts  # [experts, 2 * width, hidden], the rows of gate before those of up
    down: Tensor | PackedExperts  # [experts, hidden, width]
    gate_up_bias: Tensor | None = None  # float32 [experts, 2 * width]
    down_bias: Tensor | None = None  # float32 [experts, hidden]

    @property
    def count(self) -> int:
        return self.down.count if isinstance(self.down, PackedExperts) else len(self.down)

    def split(self) -> tuple[Expert, ...]:
        """Return each expert with matrices for the reference backend, which are copies in float32."""
        gate_up_bias, down_bias = self.gate_up_bias, self.down_bias
        gate_ups, downs = (
            part.handle if isinstance(part, PackedExperts) else part for part in (self.gate_up, self.down)
        )
        assert isinstance(gate_ups, Tensor) and isinstance(downs, Tensor), "only plain experts can be split"
        return tuple(
            Expert(
                PackedWeight(gate_up.float(), len(gate_up), gate_up.shape[1], gate_up.dtype),
                PackedWeight(down.float(), len(down), down.shape[1], down.dtype),
                None if gate_up_bias is None else gate_up_bias[number],
                None if down_bias is None else down_bias[number],
            )
            for number, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True))
        )


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every row uses beside those that it selects."""

    expert: Expert
    gate: PackedWeight | None = None  # one row; the sigmoid of its product with a row is the weight of the output
    scale: float = 1.0  # factor of the output


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """An activation: min(gate, limit) * sigmoid(alpha * gate) * (up + 1), with up limited to [-limit, limit]."""

    alpha: float
    limit: float


@dataclass(frozen=True, eq=False)
class Mixture:
    norm: Tensor
    eps: float
    router: PackedWeight
    experts: tuple[Expert, ...] | StackedExperts  # all, or consecutive ones that this rank has
    routing: Routing
    shared: SharedExpert | None = None
    clamp: ClampedSwiGLU | None = None  # None: silu(gate) * up; otherwise no matrix is packed as gated
    slots: ExpertSlots | None = None  # None: experts are where `routing.local_experts` says, and never move

    def split_experts(self) -> tuple[Expert, ...]:
        """Return each expert with its own matrices. Those of stacked experts are copied, for the reference backend."""
        return self.experts.split() if isinstance(self.experts, StackedExperts) else self.experts

    @property
    def shared_scale(self) -> float:
        return 1.0 if self.shared is None else self.shared.scale

    @cached_property
    def native(self) -> NativeMixture:
        """The C struct that describes this mixture to the native library."""
        assert isinstance(self.experts, tuple), "the native library reads each expert's own matrices"
        experts = (NativeExpert * len(self.experts))(*(expert.native for expert in self.experts))
        routing, router, shared, clamp = self.routing, self.router, self.shared, self.clamp
        gate = None if shared is None else shared.gate
        return NativeMixture(
            experts=experts,
            shared=None if shared is None else ctypes.pointer(shared.expert.native),
            router=router.ptr,
            shared_gate=None if gate is None else gate.ptr,
            norm=self.norm.data_ptr(),
            router_bias=_address(routing.bias),
            correction=_address(routing.correction),
            router_layout=router.layout,
            shared_gate_layout=0 if gate is None else gate.layout,
            count=router.n,
            top_k=routing.experts_per_row,
            renormalize=routing.renormalize,
            sigmoid=routing.scores == "sigmoid",
            groups=routing.groups,
            top_groups=routing.groups_per_row,
            group_best=routing.group_best,
            scales_inputs=routing.scales_inputs,
            hidden=router.k,
            first_expert=routing.first_expert,
            num_experts=len(experts),
            eps=self.eps,
            scale=routing.scale,
            shared_scale=self.shared_scale,
            swiglu_alpha=0.0 if clamp is None else clamp.alpha,
            swiglu_limit=0.0 if clamp is None else clamp.limit,
        )


def select_experts(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of the experts that each row selects, both [rows, experts_per_row].

    Of experts with equal scores, the one with the lowest number is selected first. The same holds for groups.
    """
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if routing.correction is None else scores + routing.correction
    if routing.scores == "sigmoid" and routing.correction is None and routing.groups == 1:
        choice = logits  # the sigmoids of large logits are equal
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        excluded = best.sort(dim=-1, descending=True, stable=True).indices[:, routing.groups_per_row :]
        choice = grouped.index_put((torch.arange(len(choice))[:, None], excluded), torch.tensor(-torch.inf).to(choice))
        choice = choice.flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.experts_per_row]
    weights = scores.gather(1, chosen)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if routing.scores == "sigmoid" else 0.0))
    return weights * routing.scale, chosen


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
