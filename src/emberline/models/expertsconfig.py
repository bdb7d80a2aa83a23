"""ExpertsConfig: the config of a mixture of experts, from config.json.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.core.errors import UnsupportedModel
from emberline.models.experts_spec import ExpertsSpec
from emberline.models.fields import ConfigFields

MAX_EXPERTS, MAX_EXPERT_FFN, MAX_LAYER_NUMBER = 1 << 12, 1 << 20, 1 << 30
GROUP_METHODS = {"greedy": False, "group_limited_greedy": True}  # whether groups limit the choice


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Settings of experts that only some families have. The defaults are Mixtral's."""

    groups: int = 1
    groups_chosen: int = 1  # groups per token
    scale: float = 1.0  # factor of the experts' weights
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0  # limit of the activation's inputs; 0: the activation is silu
    shared_ffn: int = 0  # inner width of the shared expert; 0: there is none
    has_shared_gate: bool = False
    has_router_bias: bool = False
    has_correction: bool = False
    has_biases: bool = False  # whether the experts have biases


NO_OPTIONS = ExpertOptions()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    count: int
    chosen: int  # experts per token
    ffn: int  # inner width of one expert
    renormalised: bool  # whether the weights of the chosen experts are scaled to sum to 1
    layers: tuple[bool, ...]  # whether each layer has experts; the others are dense
    # Not part of `repr`, so that KV blocks that were stored before this field existed stay valid.
    options: ExpertOptions = field(default=NO_OPTIONS, repr=False)
    # Of a rank: the experts that it has; None: all.
    local_experts: range | None = field(default=None, repr=False)
    # Of a rank: how many experts of other ranks it has memory for, beside its own.
    spare: int = field(default=0, repr=False)

    @property
    def num_local_slots(self) -> int:
        """The number of experts for which a rank has memory."""
        return len(self.numbers) + self.spare

    @property
    def numbers(self) -> range:
        """The numbers of the experts that this rank has."""
        return range(self.count) if self.local_experts is None else self.local_experts

    @staticmethod
    def from_hf(fields: ConfigFields, spec: ExpertsSpec, layers: int) -> ExpertsConfig:
        # transformers 5 writes num_local_experts for many models; earlier releases used names per model.
        names = [name for name in spec.count_fields if fields.has_field(name)] or [spec.count_fields[-1]]
        count = fields.size(names[0], maximum=MAX_EXPERTS)
        activation = fields.text("hidden_act")
        if activation not in ("silu", "swish"):
            raise UnsupportedModel(f"config.json: hidden_act {activation[:80]!r} is not supported for experts")
        renormalised, chosen = spec.renormalised, fields.size("num_experts_per_tok", maximum=count)
        ffn = fields.size(spec.ffn_field, maximum=MAX_EXPERT_FFN)
        return ExpertsConfig(
            count=count,
            chosen=chosen,
            ffn=ffn,
            renormalised=fields.flag(renormalised) if isinstance(renormalised, str) else renormalised,
            layers=_read_layers(fields, spec, layers),
            options=_read_options(fields, spec, count, chosen, ffn),
        )

    def weight_shapes(self, hidden: int, experts: int) -> tuple[list[tuple[int, int]], int]:
        """Return the shapes of a layer's matrices, with `experts` of its experts, and the total size of its vectors."""
        options = self.options
        matrices = [(self.count, hidden), *experts * [(2 * self.ffn, hidden), (hidden, self.ffn)]]
        if options.shared_ffn:
            matrices += [(2 * options.shared_ffn, hidden), (hidden, options.shared_ffn)]
            matrices += [(1, hidden)] if options.has_shared_gate else []
        vectors = self.count * (options.has_router_bias + options.has_correction)
        return matrices, vectors + experts * (2 * self.ffn + hidden) * options.has_biases


def _read_layers(fields: ConfigFields, spec: ExpertsSpec, layers: int) -> tuple[bool, ...]:
    match spec.layer_rule:
        case "step":
            step = fields.size("decoder_sparse_step", maximum=MAX_LAYER_NUMBER)
            dense = fields.id_list("mlp_only_layers")
            return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
        case "after_dense":
            first = fields.size("first_k_dense_replace", minimum=0, maximum=MAX_LAYER_NUMBER)
            return tuple(layer >= first for layer in range(layers))
        case "interleaved":
            step = fields.size("interleave_moe_layer_step", maximum=MAX_LAYER_NUMBER)
            sparse = fields.id_list("moe_layers") if fields.has_field("moe_layers") else range(step - 1, layers, step)
            return tuple(layer in sparse for layer in range(layers))
        case _:
            return (True,) * layers


def _read_options(fields: ConfigFields, spec: ExpertsSpec, count: int, chosen: int, ffn: int) -> ExpertOptions:
    groups, groups_chosen = _read_groups(fields, spec, count, chosen)
    tensors, shared_ffn = spec.tensors[0], _read_shared_ffn(fields, spec, ffn)
    return ExpertOptions(
        groups=groups,
        groups_chosen=groups_chosen,
        scale=fields.number(spec.scale_field) if spec.scale_field else 1.0,
        swiglu_alpha=fields.number("swiglu_alpha") if spec.is_clamped else 0.0,
        swiglu_limit=fields.number("swiglu_limit", minimum=1e-3) if spec.is_clamped else 0.0,
        shared_ffn=shared_ffn,
        has_shared_gate=bool(shared_ffn and spec.shared is not None and spec.shared.gate),
        has_router_bias=bool(tensors.router_bias),
        has_correction=bool(tensors.correction),
        has_biases=bool(tensors.down_bias),
    )


def _read_shared_ffn(fields: ConfigFields, spec: ExpertsSpec, ffn: int) -> int:
    shared = spec.shared
    if shared is None:
        return 0
    if shared.ffn_field:
        return fields.size(shared.ffn_field, minimum=0, maximum=MAX_EXPERT_FFN)
    return ffn * fields.size(shared.count_field, minimum=0, maximum=MAX_EXPERTS)


def _read_groups(fields: ConfigFields, spec: ExpertsSpec, count: int, chosen: int) -> tuple[int, int]:
    """Return the number of groups of experts, and the number of groups from which a token may choose experts."""
    if not spec.group_best:
        return 1, 1
    if spec.method_field:
        method = fields.text(spec.method_field)
        if method not in GROUP_METHODS:
            hint = f"supported: {' '.join(GROUP_METHODS)}"
            raise UnsupportedModel(f"config.json: {spec.method_field} {method[:80]!r} is not supported", hint=hint)
        if not GROUP_METHODS[method]:
            return 1, 1
    groups = fields.size("n_group", maximum=count)
    if groups == 1:
        return 1, 1
    if count % groups or count // groups < spec.group_best:
        raise fields.invalid_error(
            "n_group", f"a divisor of {count}, with {spec.group_best} or more experts in a group"
        )
    groups_chosen = fields.size("topk_group", maximum=groups)
    if groups_chosen * (count // groups) < chosen:
        raise fields.invalid_error("topk_group", f"large enough for {chosen} experts in groups of {count // groups}")
    return groups, groups_chosen
