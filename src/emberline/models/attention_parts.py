"""AttentionParts: how a decoder's attention differs from Llama's, where the fields of DecoderParts do not say it.

The cache keys of stored KV blocks contain a hash of the fields of DecoderParts. So later fields were added here: a new
field there would make stored blocks unusable.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.core.errors import UnsupportedModel
from emberline.models.architecture import Architecture
from emberline.models.fields import ConfigFields
from emberline.models.outline import LatentConfig, StateSizes

# Larger sizes are rejected as damaged or malicious.
MAX_LATENT_SIZE, MAX_STATE_HEADS, MAX_STATE_DIM, MAX_CONV_KERNEL = 1 << 16, 1 << 12, 1 << 10, 64


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by 1 + strength * log(1 + floor((p + 1) / interval))."""

    interval: float  # in tokens
    strength: float


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """How a decoder's attention differs from Llama's, whose values are the defaults."""

    chunked_windows: bool = False  # whether windows are chunks: a query attends to the chunk of that size that it is in
    has_sinks: bool = False  # whether each query head has a learned score that joins the softmax and has no value
    has_weightless_qk_norm: bool = False  # whether rotated query and key heads get an RMS norm without weights
    unrotated_temperature: QueryTemperature | None = None  # of layers without rotary embedding
    latent: LatentConfig | None = None
    # Not part of `repr`, so that KV blocks that were stored before these fields existed stay valid.
    has_output_gate: bool = field(default=False, repr=False)  # whether the sigmoid of a gate multiplies the output
    # Recurrent layers, which have the gated delta rule instead of attention: their sizes, their indexes, and whether
    # their input projections are grouped by key head.
    state: StateSizes | None = field(default=None, repr=False)
    state_layers: tuple[int, ...] = field(default=(), repr=False)
    has_grouped_delta_tensors: bool = field(default=False, repr=False)

    @staticmethod
    def from_hf(fields: ConfigFields, arch: Architecture) -> AttentionParts:
        norm = arch.weightless_qk_norm
        state_layers = _read_state_layers(fields) if arch.delta_tensors else ()
        return AttentionParts(
            chunked_windows=arch.chunked_windows,
            has_sinks=arch.attention_sinks,
            has_weightless_qk_norm=fields.flag(norm) if isinstance(norm, str) else norm,
            unrotated_temperature=_read_temperature(fields, arch),
            latent=read_latent_config(fields) if arch.latent_attention else None,
            has_output_gate=arch.output_gate,
            state=_read_state_sizes(fields) if state_layers else None,
            state_layers=state_layers,
            has_grouped_delta_tensors=arch.delta_tensors == "grouped",
        )


LLAMA_ATTENTION = AttentionParts()


def _read_state_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Return the numbers of the recurrent layers, which `layer_types` lists.

    Without `layer_types`, all layers are recurrent except every full_attention_interval-th."""
    count = fields.size("num_hidden_layers", maximum=1 << 20)
    if not fields.has_field("layer_types"):
        interval = fields.size("full_attention_interval", maximum=1 << 20)
        if interval > count:
            raise fields.invalid_error("full_attention_interval", f"at most num_hidden_layers, {count}")
        return tuple(layer for layer in range(count) if (layer + 1) % interval)
    kinds = fields.text_list("layer_types")
    if len(kinds) != count:
        raise fields.invalid_error("layer_types", f"a list of {count} layer types")
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise UnsupportedModel(f"config.json: layer_types has {min(unknown)[:80]!r}, which is not supported")
    if "full_attention" not in kinds:
        raise UnsupportedModel("config.json: layer_types has no 'full_attention', without which there is no KV cache")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def read_latent_config(fields: ConfigFields) -> LatentConfig:
    def size(name: str) -> int:
        return fields.size(name, maximum=MAX_LATENT_SIZE)

    for name in ("qk_rope_head_dim", "kv_lora_rank"):
        if size(name) % 2:
            raise fields.invalid_error(name, "even")
    return LatentConfig(
        kv_rank=size("kv_lora_rank"),
        q_rank=size("q_lora_rank") if fields.has_field("q_lora_rank") else 0,
        rotary_dim=size("qk_rope_head_dim"),
        plain_dim=size("qk_nope_head_dim"),
        value_dim=size("v_head_dim"),
    )


def _read_state_sizes(fields: ConfigFields) -> StateSizes:
    if fields.text("hidden_act") not in ("silu", "swish"):
        raise fields.invalid_error("hidden_act", "silu for a model with recurrent layers")
    keys = fields.size("linear_num_key_heads", maximum=MAX_STATE_HEADS)
    values = fields.size("linear_num_value_heads", maximum=MAX_STATE_HEADS)
    if values % keys:
        raise fields.invalid_error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {keys}")
    return StateSizes(
        key_heads=keys,
        value_heads=values,
        key_dim=fields.size("linear_key_head_dim", maximum=MAX_STATE_DIM),
        value_dim=fields.size("linear_value_head_dim", maximum=MAX_STATE_DIM),
        conv_kernel=fields.size("linear_conv_kernel_dim", maximum=MAX_CONV_KERNEL),
    )


def _read_temperature(fields: ConfigFields, arch: Architecture) -> QueryTemperature | None:
    if not arch.temperature_flag_field:
        return None
    # The first configs of Llama 4 have a number here, which counts as true if it is not 0.
    is_tuned = fields.values.get(arch.temperature_flag_field)
    if not (type(is_tuned) is int and is_tuned > 0) and not fields.flag(arch.temperature_flag_field):
        return None
    return QueryTemperature(fields.number("floor_scale", minimum=1.0), fields.number("attn_scale"))
