"""ExpertsSpec: how a family of models stores a mixture of experts, and which config.json fields describe it.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Which layers have experts: all; every decoder_sparse_step-th except mlp_only_layers; those after the first
# first_k_dense_replace; those in moe_layers, or every interleave_moe_layer_step-th.
LayerRule = Literal["all", "step", "after_dense", "interleaved"]
LAYER_RULE_FIELDS: dict[LayerRule, set[str]] = {
    "all": set(),
    "step": {"decoder_sparse_step", "mlp_only_layers"},
    "after_dense": {"first_k_dense_replace"},
    "interleaved": {"moe_layers", "interleave_moe_layer_step"},
}
# How one tensor stores the gate and up matrices: the rows of gate, then those of up; the same, transposed; or
# transposed, with the columns of gate and up in turn.
GateUpOrder = Literal["rows", "columns", "interleaved_columns"]


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The names of the tensors of a layer's experts, relative to the layer.

    `{}` stands for the number of an expert. The names of an expert's biases end in "bias" instead of "weight".
    A name without `{}` is that of one tensor with all experts, in its first dimension. Then `order` says how gate and
    up are stored in `gate_up`, and `down` is transposed unless the order is "rows".
    """

    router: str
    gate_up: tuple[str, ...]  # gate and up, or one tensor with both
    down: str
    order: GateUpOrder = "rows"
    gate_up_bias: str = ""  # of all experts, in the order of the columns of `gate_up`
    down_bias: str = ""
    router_bias: str = ""
    correction: str = ""  # added to the scores for the selection of experts only


def per_expert_names(
    module: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), correction: str = ""
) -> ExpertTensors:
    """Return the tensor names of checkpoints with a tensor for each matrix of each expert.

    `names`: of gate, up and down."""
    gate, up, down = (f"{module}.experts.{{}}.{name}.weight" for name in names)
    return ExpertTensors(f"{module}.gate.weight", (gate, up), down, correction=correction)


def stacked_expert_names(module: str = "mlp", correction: str = "") -> ExpertTensors:
    """Return the tensor names of checkpoints with two tensors for the matrices of all experts.

    transformers 5 and some other tools write such files."""
    experts = f"{module}.experts"
    return ExpertTensors(
        f"{module}.gate.weight", (f"{experts}.gate_up_proj",), f"{experts}.down_proj", correction=correction
    )


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """The expert that every token uses: its tensors, relative to the layer, and the field with its inner width."""

    gate_up: tuple[str, ...]
    down: str
    ffn_field: str = ""  # absent or 0: there is no such expert
    count_field: str = ""  # alternative: field with its inner width, in multiples of the other experts' width
    gate: str = ""  # tensor; the sigmoid of its product with a token is a factor of the output


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    tensors: tuple[ExpertTensors, ...]  # alternatives; a checkpoint has one of them
    ffn_field: str  # field with the inner width of one expert
    renormalised: bool | str  # whether weights of chosen experts are scaled to sum to 1, or the field that decides
    layer_rule: LayerRule = "all"
    count_fields: tuple[str, ...] = ("num_experts", "num_local_experts")  # alternatives, of the number of experts
    scores: Literal["softmax", "sigmoid"] = "softmax"
    group_best: int = 0  # a group's score is the sum of this many of its highest scores; 0: there are no groups
    method_field: str = ""  # field that says whether groups limit the choice; empty: they always do
    scale_field: str = ""  # field with a factor of the weights
    scales_inputs: bool = False  # whether weights multiply the inputs of experts instead of their outputs
    is_clamped: bool = False  # whether the activation is the clamped one of gpt-oss
    shared: SharedExpertSpec | None = None

    def read_fields(self) -> set[str]:
        """Return the config.json fields that describe the experts."""
        fields = {"num_experts_per_tok", self.ffn_field, self.scale_field, self.method_field, *self.count_fields}
        fields |= LAYER_RULE_FIELDS[self.layer_rule]
        fields |= {self.renormalised} if isinstance(self.renormalised, str) else set()
        fields |= {"n_group", "topk_group"} if self.group_best else set()
        fields |= {"swiglu_alpha", "swiglu_limit"} if self.is_clamped else set()
        fields |= {self.shared.ffn_field, self.shared.count_field} if self.shared is not None else set()
        return fields - {""}


def name_shared_expert(module: str, ffn_field: str = "", count_field: str = "", gate: str = "") -> SharedExpertSpec:
    names = (f"{module}.gate_proj.weight", f"{module}.up_proj.weight")
    return SharedExpertSpec(names, f"{module}.down_proj.weight", ffn_field, count_field, gate)


MIXTRAL = ExpertsSpec(
    (per_expert_names("block_sparse_moe", ("w1", "w3", "w2")), stacked_expert_names()),
    "intermediate_size",
    renormalised=True,
)
QWEN2_MOE = ExpertsSpec(
    (per_expert_names(), stacked_expert_names()),
    "moe_intermediate_size",
    "norm_topk_prob",
    layer_rule="step",
    shared=name_shared_expert(
        "mlp.shared_expert", "shared_expert_intermediate_size", gate="mlp.shared_expert_gate.weight"
    ),
)
QWEN3_MOE = ExpertsSpec(
    (per_expert_names(), stacked_expert_names()), "moe_intermediate_size", "norm_topk_prob", layer_rule="step"
)
QWEN3_5_MOE = replace(QWEN2_MOE, renormalised=True, layer_rule="all")
OLMOE = ExpertsSpec((per_expert_names(), stacked_expert_names()), "intermediate_size", "norm_topk_prob")
GRANITE_TENSORS = (
    ExpertTensors(
        "block_sparse_moe.router.layer.weight",
        ("block_sparse_moe.input_linear.weight",),
        "block_sparse_moe.output_linear.weight",
    ),
    ExpertTensors(
        "block_sparse_moe.router.weight",
        ("block_sparse_moe.experts.gate_up_proj",),
        "block_sparse_moe.experts.down_proj",
    ),
    replace(per_expert_names("block_sparse_moe"), router="block_sparse_moe.router.layer.weight"),  # from GGUF files
)
GRANITE_MOE = ExpertsSpec(GRANITE_TENSORS, "intermediate_size", renormalised=True, count_fields=("num_local_experts",))
GRANITE_MOE_SHARED = ExpertsSpec(
    GRANITE_TENSORS,
    "intermediate_size",
    renormalised=True,
    count_fields=("num_local_experts",),
    shared=SharedExpertSpec(
        ("shared_mlp.input_linear.weight",), "shared_mlp.output_linear.weight", "shared_intermediate_size"
    ),
)
CORRECTION = "mlp.gate.e_score_correction_bias"
DEEPSEEK_V3 = ExpertsSpec(  # also of GLM-4.5, Kimi K2 and dots.llm1
    (per_expert_names(correction=CORRECTION), stacked_expert_names(correction=CORRECTION)),
    "moe_intermediate_size",
    "norm_topk_prob",
    layer_rule="after_dense",
    count_fields=("n_routed_experts", "num_local_experts"),
    scores="sigmoid",
    group_best=2,
    scale_field="routed_scaling_factor",
    shared=name_shared_expert("mlp.shared_experts", count_field="n_shared_experts"),
)
DEEPSEEK_V2 = ExpertsSpec(
    (per_expert_names(), stacked_expert_names()),
    "moe_intermediate_size",
    renormalised=False,
    layer_rule="after_dense",
    count_fields=("n_routed_experts", "num_experts"),
    group_best=1,
    method_field="topk_method",
    scale_field="routed_scaling_factor",
    shared=name_shared_expert("mlp.shared_experts", count_field="n_shared_experts"),
)
LLAMA4 = ExpertsSpec(
    (
        ExpertTensors(
            "feed_forward.router.weight",
            ("feed_forward.experts.gate_up_proj",),
            "feed_forward.experts.down_proj",
            order="columns",
        ),
        replace(per_expert_names("feed_forward"), router="feed_forward.router.weight"),
    ),
    "intermediate_size",
    renormalised=False,
    layer_rule="interleaved",
    count_fields=("num_local_experts",),
    scores="sigmoid",
    scales_inputs=True,
    shared=name_shared_expert("feed_forward.shared_expert", "intermediate_size"),
)
GPT_OSS = ExpertsSpec(
    (
        ExpertTensors(
            "mlp.router.weight",
            ("mlp.experts.gate_up_proj",),
            "mlp.experts.down_proj",
            order="interleaved_columns",
            gate_up_bias="mlp.experts.gate_up_proj_bias",
            down_bias="mlp.experts.down_proj_bias",
            router_bias="mlp.router.bias",
        ),
        replace(per_expert_names(), router="mlp.router.weight", router_bias="mlp.router.bias"),  # from GGUF files
    ),
    "intermediate_size",
    renormalised=True,
    count_fields=("num_local_experts", "num_experts"),
    is_clamped=True,
)
