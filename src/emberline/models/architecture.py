"""Architecture: how a family of decoders differs from Llama 1.

A rule of an architecture (for example: does a layer have a bias?) is True, False, or the name of the config.json field
that decides. A rule whose name ends in `_field` is the name of a field with a number; empty: there is none.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from emberline.models.experts_spec import ExpertsSpec

NormPlacement = Literal["pre", "post", "both", "shared"]
NormKind = Literal["rms", "layer"]
QKNormKind = Literal["head", "projection", "head_layer"]
DeltaTensors = Literal["", "grouped", "separate"]
UnrotatedRule = Literal["", "listed", "windowless", "unless_rope"]


# What transformers assumes where config.json has no such field, unless the defaults of an architecture say otherwise.
COMMON_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "interleave_moe_layer_step": 1,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "norm_topk_prob": False,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}
# What null means in the fields where transformers reads it as another value than the default. None: the field counts as
# absent and has no default, which turns a feature off, or derives a size from others.
NULL_VALUES: Mapping[str, Any] = {
    "attention_chunk_size": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": None,
    "norm_topk_prob": False,
    "num_key_value_heads": None,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": None,
    "rope_interleave": False,
    "sliding_window": None,
    "use_qk_norm": False,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    window: bool | str = False  # whether sliding_window applies
    experts: ExpertsSpec | None = None
    # What transformers assumes where config.json has no such field: the differences from COMMON_DEFAULTS.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_rope: Mapping[str, Any] = field(default_factory=dict)  # without rope_parameters and rope_scaling
    is_strict: bool = True  # True: unknown fields of config.json are refused; False: only those of other families
    turn_end_tokens: tuple[str, ...] = ()  # that end a chat model's turn, even if no file of the checkpoint says so
    ignored_fields: tuple[str, ...] = ()  # fields that have no effect, or only one that other fields repeat
    fixed_fields: Mapping[str, Any] = field(default_factory=dict)  # fields that may have this value only

    # Norms: before attention and feed-forward network, after them, both, or one before the two, which run in parallel.
    norms: NormPlacement = "pre"
    norm_kind: NormKind = "rms"
    norm_offset: float = 0.0  # added to the stored weights of norms
    norm_eps_field: str = "rms_norm_eps"
    qk_norm_kind: QKNormKind = "head"  # an RMS norm per head or of the whole projection, or a layer norm per head

    weightless_qk_norm: bool | str = False  # whether rotated query and key heads get an RMS norm without weights
    latent_attention: bool = False  # multi-head latent attention
    output_gate: bool = False  # whether the output of attention is multiplied by the sigmoid of a gate
    delta_tensors: DeltaTensors = ""  # order of gated delta rule tensors: by key head or not; empty: no such layers
    attention_sinks: bool = False  # whether each query head has a score that joins the softmax and has no value

    # Tensors, relative to a layer.
    qkv_tensor: str = ""  # one tensor with the projections q, k and v; empty: three tensors
    gate_up_tensor: str = ""  # one tensor with gate and up; empty: two
    down_tensor: str = "mlp.down_proj"

    ffn_field: str = "intermediate_size"
    mtp_layers_field: str = ""  # field with the number of layers for multi-token prediction
    mtp_module: str = ""  # prefix of the MTP head's tensors; empty: the head is stored as a layer after the last
    activation_field: str = "hidden_act"

    # Windows and rotary embedding.
    has_layer_types: bool = True  # whether layer_types may say which layers have windows
    first_window_field: str = ""  # without layer_types, field with the number of the first layer with a window
    chunked_windows: bool = False  # whether windows are chunks: of attention_chunk_size, on chunked_attention layers
    window_pattern: int = 0  # without layer_types, every n-th layer has no window, with this n; 0: all have one
    window_pattern_field: str = ""  # field with that number
    unrotated: UnrotatedRule = (
        ""  # layers without rotary embedding: in no_rope_layers, without window, all unless "rope"
    )
    interleaved_rope: bool | str = False
    temperature_flag_field: str = ""  # whether floor_scale and attn_scale apply to layers without rotary embedding
    partial_rotary: bool = False
    has_local_rope: bool = False  # whether layers with a window have a rotary embedding of their own
    local_theta_field: str = ""  # field with rope_theta of these layers, in configs from before transformers 5
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of kinds of rope scaling
    has_final_max_position: bool = False  # whether max_position_embeddings is the length after rope scaling

    # Scales and caps.
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of hidden_size
    attention_scalar_field: str = ""  # scores are divided by the square root of this
    attention_multiplier_field: str = ""  # or multiplied by this
    attention_softcap_field: str = ""
    embedding_multiplier_field: str = ""
    residual_multiplier_field: str = ""
    logit_multiplier_field: str = ""
    logit_divisor_field: str = ""
    logit_softcap_field: str = ""

    def fill_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the default of every field that it lacks.

        A null counts as absent, except in the fields of NULL_VALUES."""
        given = {
            name: NULL_VALUES[name] if value is None else value
            for name, value in config.items()
            if value is not None or name in NULL_VALUES
        }
        defaults = {**COMMON_DEFAULTS, **self.defaults}
        counts = set() if self.experts is None else set(self.experts.count_fields)
        if any(given.get(name) is not None for name in counts):  # names of the same number
            defaults = {name: value for name, value in defaults.items() if name not in counts}
        return {**defaults, **given}

    def read_fields(self) -> set[str]:
        """Return the config.json fields that the rules name."""
        rules = {f.name: getattr(self, f.name) for f in fields(self)}
        flags = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "weightless_qk_norm", "window", "interleaved_rope")
        named = {name for name in flags if rules[name] is not True}
        return {rules[name] for name in rules if name in named or name.endswith("_field")} - {False, ""}
