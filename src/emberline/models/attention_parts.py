"""AttentionParts: kinds of attention that DecoderParts had no words for when the first KV blocks were stored.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.models.fields import ConfigFields
from emberline.models.registry import Architecture


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by 1 + strength * log(1 + floor((p + 1) / interval))."""

    interval: float  # in tokens
    strength: float


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The defaults are Llama's."""

    chunked_windows: bool = False  # whether a layer's window is the chunk of that size that a query is in
    has_sinks: bool = False  # whether each query head has a learned score that joins the softmax and has no value
    has_weightless_qk_norm: bool = False  # whether rotated query and key heads get an RMS norm without weights
    unrotated_temperature: QueryTemperature | None = None  # of layers without rotary embedding

    @staticmethod
    def from_hf(fields: ConfigFields, arch: Architecture) -> AttentionParts:
        norm = arch.weightless_qk_norm
        return AttentionParts(
            chunked_windows=arch.chunked_windows,
            has_sinks=arch.attention_sinks,
            has_weightless_qk_norm=fields.flag(norm, False) if isinstance(norm, str) else norm,
            unrotated_temperature=_read_temperature(fields, arch),
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
