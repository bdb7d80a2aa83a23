"""AttentionParts: kinds of attention that DecoderParts had no words for when the first KV blocks were stored.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.models.architecture import Architecture
from emberline.models.fields import ConfigFields

MAX_LATENT_SIZE = 1 << 16  # larger sizes are rejected as damaged or malicious


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by 1 + strength * log(1 + floor((p + 1) / interval))."""

    interval: float  # in tokens
    strength: float


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (MLA), in which all heads share one compressed key and value per token."""

    kv_rank: int  # elements of the latent, from which keys and values of all heads are computed
    q_rank: int  # elements of the compressed queries; 0: queries are not compressed
    rotary_dim: int  # elements of a head's queries and keys that are rotated; the keys' are shared by all heads
    plain_dim: int  # elements of a head's queries and keys that are not rotated
    value_dim: int  # of a head

    @property
    def cached_dim(self) -> int:
        """The elements of a token in the KV cache of a layer: the rotated elements of the keys, then the latent."""
        return self.rotary_dim + self.kv_rank

    @staticmethod
    def from_hf(fields: ConfigFields) -> LatentConfig:
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


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The defaults are Llama's."""

    chunked_windows: bool = False  # whether a layer's window is the chunk of that size that a query is in
    has_sinks: bool = False  # whether each query head has a learned score that joins the softmax and has no value
    has_weightless_qk_norm: bool = False  # whether rotated query and key heads get an RMS norm without weights
    unrotated_temperature: QueryTemperature | None = None  # of layers without rotary embedding
    latent: LatentConfig | None = None

    @staticmethod
    def from_hf(fields: ConfigFields, arch: Architecture) -> AttentionParts:
        norm = arch.weightless_qk_norm
        return AttentionParts(
            chunked_windows=arch.chunked_windows,
            has_sinks=arch.attention_sinks,
            has_weightless_qk_norm=fields.flag(norm, False) if isinstance(norm, str) else norm,
            unrotated_temperature=_read_temperature(fields, arch),
            latent=LatentConfig.from_hf(fields) if arch.latent_attention else None,
        )


LLAMA_ATTENTION = AttentionParts()


def _read_temperature(fields: ConfigFields, arch: Architecture) -> QueryTemperature | None:
    if not arch.temperature_flag_field:
        return None
    # The first configs of Llama 4 have a number here, which counts as true if it is not 0.
    is_tuned = fields.values.get(arch.temperature_flag_field)
    if not (type(is_tuned) is int and is_tuned > 0) and not fields.flag(arch.temperature_flag_field, False):
        return None
    return QueryTemperature(fields.number("floor_scale", minimum=1.0), fields.number("attn_scale"))
