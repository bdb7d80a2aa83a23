"""SparseFeedForward: a feed-forward network with a mixture of experts, including norm and residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import ClampedSwiGLU, Expert, Mixture, Routing, SharedExpert
from emberline.models.config import ModelConfig
from emberline.models.expert_dispatch import ExpertDispatch
from emberline.models.expert_placement import EMPTY_SLOT, Placement
from emberline.models.experts_spec import ExpertsSpec, ExpertTensors, SharedExpertSpec
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.movable_experts import MovableExperts
from emberline.models.registry import ARCHITECTURES
from emberline.models.row_exchange import RowExchange
from emberline.models.stacked_experts import keep_down_bias, load_stacked_experts
from emberline.models.weights import Weights


@dataclass(slots=True)
class SparseFeedForward:
    mixture: Mixture  # replaced if the rank gets other experts
    comm: Communicator | None = None  # sums the outputs of ranks, each of which has a part of the experts
    dispatch: ExpertDispatch | None = None  # sends rows to the ranks that have their experts, instead of summing
    movable: MovableExperts | None = None  # None: experts never move between ranks that get every rank's rows

    @staticmethod
    def load(config: ModelConfig, weights: Weights, layer: int) -> SparseFeedForward:
        spec = ARCHITECTURES[config.model_type].experts
        assert spec is not None
        return SparseFeedForward.load_from(config, spec, weights, f"model.layers.{layer}")

    @staticmethod
    def load_from(config: ModelConfig, spec: ExpertsSpec, weights: Weights, at: str) -> SparseFeedForward:
        """Load the network of a layer. `at`: how the names of the layer's tensors begin."""
        experts, hidden, residual = config.experts, config.hidden, config.parts.residual_multiplier
        assert experts is not None and config.parts.norms == "pre"
        options, tensors = experts.options, _find_tensors(spec, experts, weights, at)
        clamped = ClampedSwiGLU(options.swiglu_alpha, options.swiglu_limit) if options.swiglu_limit else None
        norm = weights.load_vector(f"{at}.post_attention_layernorm.weight", hidden, offset=config.parts.norm_offset)
        slots = _make_slots(experts, weights)
        return SparseFeedForward(
            Mixture(
                norm=norm,
                eps=config.norm_eps,
                router=weights.pack(weights.load_matrix(f"{at}.{tensors.router}", experts.count, hidden)),
                experts=(
                    load_stacked_experts(weights, experts, tensors, at, hidden)
                    if weights.stacks_experts
                    else _load_experts(weights, experts, tensors, at, hidden)
                ),
                routing=Routing(
                    experts_per_row=experts.chosen,
                    renormalize=experts.renormalised,
                    scores=spec.scores,
                    bias=_load_vector(weights, at, tensors.router_bias, experts.count),
                    correction=_load_vector(weights, at, tensors.correction, experts.count),
                    groups=options.groups,
                    groups_per_row=options.groups_chosen,
                    group_best=max(1, spec.group_best),
                    scale=options.scale * residual,
                    scales_inputs=spec.scales_inputs,
                    local_experts=experts.local_experts,
                ),
                shared=_load_shared_expert(weights, experts, spec.shared, at, hidden, residual),
                clamp=clamped,
                slots=slots,
            ),
            weights.comm,
            ExpertDispatch.for_shard(weights.shard, experts.count, weights.device),
            None if slots is None else MovableExperts(experts.count, slots),
        )

    def __call__(
        self, x: Tensor, unpacker: ops.WeightUnpacker | None = None, exchange: RowExchange | None = None
    ) -> Tensor:
        """Add the network's output to x in place. `exchange`: moves rows between ranks, if each has rows of its own."""
        if self.comm is None:
            return ops.run_mixture(x, self.mixture)
        if exchange is not None and self.dispatch is not None:
            return self.dispatch.add_outputs(x, self.mixture, exchange)
        if exchange is not None and self.movable is not None:
            return self.movable.add_outputs(x, self.mixture, exchange)
        if exchange is not None:
            rows = exchange.gather(x)
            return x.add_(exchange.reduce_scatter(ops.run_mixture(rows, self.mixture, add_to=torch.zeros_like(rows))))
        return self.comm.all_reduce_add(x, ops.run_mixture(x, self.mixture, add_to=torch.zeros_like(x)))

    def place_experts(self, placement: Placement, group: int, loaded: Mapping[int, Expert]) -> None:
        """Use the experts of `placement` from now on.

        `group`: the group of this rank. `loaded`: the experts that this rank needs now and did not have before."""
        assert self.dispatch is not None and isinstance(self.mixture.experts, tuple)
        kept = dict(zip(self.dispatch.placement[group], self.mixture.experts, strict=False))
        available = kept | dict(loaded)
        unused = next(iter(self.mixture.experts))  # in an empty slot, to which no row is sent
        experts = tuple(unused if number == EMPTY_SLOT else available[number] for number in placement[group])
        self.mixture = replace(self.mixture, experts=experts)
        self.dispatch.set_placement(placement)


def _make_slots(experts: ExpertsConfig, weights: Weights) -> ExpertSlots | None:
    """Return the tables of which slots have which experts; None: experts never move between ranks."""
    if not experts.spare or experts.local_experts is None:
        return None
    groups, shard = experts.count // len(experts.local_experts), weights.shard
    return ExpertSlots(experts.count, groups, experts.num_local_slots, weights.device, shard.expert_group)


def load_expert(config: ModelConfig, weights: Weights, layer: int) -> Expert:
    """Load one expert of a layer. `config` and the shard of `weights` must select exactly one."""
    spec, experts, at = ARCHITECTURES[config.model_type].experts, config.experts, f"model.layers.{layer}"
    assert spec is not None and experts is not None
    (expert,) = _load_experts(weights, experts, _find_tensors(spec, experts, weights, at), at, config.hidden)
    return expert


def _find_tensors(spec: ExpertsSpec, experts: ExpertsConfig, weights: Weights, at: str) -> ExpertTensors:
    """Return the tensor names of experts that the checkpoint uses, or the first alternative if it uses none of them."""
    first = experts.numbers.start
    found = (names for names in spec.tensors if weights.has_tensor(f"{at}.{names.down.format(first)}"))
    return next(found, spec.tensors[0])


def _load_vector(weights: Weights, at: str, name: str, *shape: int) -> Tensor | None:
    return weights.load_vector(f"{at}.{name}", *shape) if name else None


def _load_experts(
    weights: Weights, experts: ExpertsConfig, tensors: ExpertTensors, at: str, hidden: int
) -> tuple[Expert, ...]:
    if "{}" in tensors.down:
        return tuple(
            _load_gated_network(
                weights,
                tuple(f"{at}.{name.format(number)}" for name in tensors.gate_up),
                f"{at}.{tensors.down.format(number)}",
                hidden,
                experts.ffn,
                gated=not experts.options.swiglu_limit,
                has_biases=experts.options.has_biases,
            )
            for number in experts.numbers
        )
    count, ffn, order = len(experts.numbers), experts.ffn, tensors.order
    gate_up_shape, down_shape = (2 * ffn, hidden), (hidden, ffn)
    if order != "rows":
        gate_up_shape, down_shape = (hidden, 2 * ffn), (ffn, hidden)
    gated = not experts.options.swiglu_limit
    biases = [
        _load_vector(weights, at, tensors.gate_up_bias, count, 2 * ffn),
        _load_vector(weights, at, tensors.down_bias, count, hidden),
    ]
    biases[1] = keep_down_bias(weights, biases[1])
    gate_up = weights.experts_linear(
        f"{at}.{tensors.gate_up[0]}",
        (count, *gate_up_shape),
        lambda part: _split_gate_up(part if order == "rows" else part.t(), interleaved=order == "interleaved_columns"),
        gated=gated,
    )
    down = weights.experts_linear(
        f"{at}.{tensors.down}", (count, *down_shape), lambda part: part if order == "rows" else part.t()
    )
    gate_up_bias, down_bias = biases
    assert gate_up_bias is None or not gated
    if gate_up_bias is not None and order == "interleaved_columns":
        gate_up_bias = torch.cat([gate_up_bias[:, ::2], gate_up_bias[:, 1::2]], dim=1)
    return tuple(
        Expert(
            gate_up[number],
            down[number],
            None if gate_up_bias is None else gate_up_bias[number],
            None if down_bias is None else down_bias[number],
        )
        for number in range(count)
    )


def _split_gate_up(matrix: Tensor, *, interleaved: bool) -> Tensor:
    """Return the matrix [2 * ffn, hidden] with the rows of gate before those of up."""
    return torch.cat([matrix[::2], matrix[1::2]]) if interleaved else matrix


def _load_shared_expert(
    weights: Weights,
    experts: ExpertsConfig,
    spec: SharedExpertSpec | None,
    at: str,
    hidden: int,
    scale: float,
) -> SharedExpert | None:
    ffn = experts.options.shared_ffn
    if spec is None or not ffn:
        return None
    expert = _load_gated_network(
        weights, tuple(f"{at}.{name}" for name in spec.gate_up), f"{at}.{spec.down}", hidden, ffn
    )
    gate = weights.linear([(f"{at}.{spec.gate}", 1)], hidden, full_precision=True) if spec.gate else None
    return SharedExpert(expert, gate, scale)


def _load_gated_network(
    weights: Weights,
    gate_up: tuple[str, ...],
    down: str,
    hidden: int,
    ffn: int,
    *,
    gated: bool = True,
    has_biases: bool = False,
) -> Expert:
    """Load an expert whose gate and up matrices are one tensor or two. `gated`: whether the kernel interleaves them."""
    parts = [(name, 2 * ffn // len(gate_up)) for name in gate_up]
    matrices = weights.linear(parts, hidden, gated=gated), weights.linear([(down, hidden)], ffn)
    if not has_biases:
        return Expert(*matrices)
    biases = [(name.removesuffix("weight") + "bias", rows) for name, rows in [*parts, (down, hidden)]]
    down_bias = keep_down_bias(weights, weights.stack_vectors(biases[-1:]))
    return Expert(*matrices, weights.stack_vectors(biases[:-1]), down_bias)
