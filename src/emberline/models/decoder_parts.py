"""DecoderParts: how the layers of a decoder differ from Llama's, from config.json.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from emberline.core.errors import UnsupportedModel
from emberline.models.architecture import Architecture, NormKind, NormPlacement, QKNormKind
from emberline.models.attention_parts import LLAMA_ATTENTION, AttentionParts
from emberline.models.fields import ConfigFields
from emberline.models.ropeconfig import RopeConfig, Ropes

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """How layers differ from Llama's, whose values are the defaults. `Architecture` describes the fields."""

    norms: NormPlacement = "pre"
    norm_kind: NormKind = "rms"
    norm_offset: float = 0.0
    qk_norm_kind: QKNormKind = "head"
    activation: Activation = "silu"
    qkv_tensor: str = ""
    gate_up_tensor: str = ""
    down_tensor: str = "mlp.down_proj"
    interleaved_rope: bool = False
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same as of the others
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None  # factor of attention scores; None: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # 0: no cap
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False  # whether the multiplier is rounded to the dtype of the weights
    residual_multiplier: float = 1.0  # of the outputs of attention and feed-forward networks
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    # Not part of `repr`, so that KV blocks that were stored before this field existed stay valid.
    attention: AttentionParts = field(default=LLAMA_ATTENTION, repr=False)

    @property
    def needs_portable_attention(self) -> bool:
        """Whether, on a GPU, only Triton kernels compute the attention, whatever its head size."""
        return self.attention.latent is not None

    @staticmethod
    def from_hf(
        fields: ConfigFields, arch: Architecture, hidden: int, windows: Sequence[int], ropes: Ropes
    ) -> DecoderParts:
        def factor(name: str) -> float:
            value = fields.number(name) if name else 1.0
            if not value:
                raise fields.invalid_error(name, "greater than 0")
            return value

        def soft_cap(name: str) -> float:
            return factor(name) if name and fields.has_field(name) else 0.0

        scale: float | None = None
        if arch.attention_scalar_field:
            scale = factor(arch.attention_scalar_field) ** -0.5
        elif arch.attention_multiplier_field:
            scale = factor(arch.attention_multiplier_field)
        attention = AttentionParts.from_hf(fields, arch)
        if attention.latent is not None:
            size = attention.latent.plain_dim + attention.latent.rotary_dim
            scale = size**-0.5 * ropes.score_factor
        embedding = math.sqrt(hidden) if arch.scaled_embedding else factor(arch.embedding_multiplier_field)
        logits = factor(arch.logit_multiplier_field) / factor(arch.logit_divisor_field)
        return DecoderParts(
            norms=arch.norms,
            norm_kind=arch.norm_kind,
            norm_offset=arch.norm_offset,
            qk_norm_kind=arch.qk_norm_kind,
            activation=_read_activation(fields, arch.activation_field),
            qkv_tensor=arch.qkv_tensor,
            gate_up_tensor=arch.gate_up_tensor,
            down_tensor=arch.down_tensor,
            interleaved_rope=_is_interleaved(fields, arch),
            local_rope=ropes.local_rope,
            unrotated_layers=_read_unrotated_layers(fields, arch, windows),
            attention_scale=scale,
            attention_softcap=soft_cap(arch.attention_softcap_field),
            embedding_multiplier=embedding,
            rounds_embedding_multiplier=arch.scaled_embedding,
            residual_multiplier=factor(arch.residual_multiplier_field),
            logit_multiplier=logits,
            logit_softcap=soft_cap(arch.logit_softcap_field),
            attention=attention,
        )


LLAMA_PARTS = DecoderParts()


def _is_interleaved(fields: ConfigFields, arch: Architecture) -> bool:
    rule = arch.interleaved_rope
    return fields.flag(rule) if isinstance(rule, str) else rule


def _read_activation(fields: ConfigFields, name: str) -> Activation:
    activation = fields.text(name)
    if activation not in ACTIVATIONS:
        hint = f"supported: {' '.join(ACTIVATIONS)}"
        raise UnsupportedModel(f"config.json: {name} {activation[:80]!r} is not supported", hint=hint)
    return ACTIVATIONS[activation]


def _read_unrotated_layers(fields: ConfigFields, arch: Architecture, windows: Sequence[int]) -> tuple[int, ...]:
    layers = range(len(windows))
    match arch.unrotated:
        case "listed":
            return tuple(
                layer for layer, rotates in enumerate(read_rotated_layers(fields, len(windows))) if not rotates
            )
        case "windowless":
            return tuple(layer for layer in layers if not windows[layer])
        case "unless_rope":
            return () if fields.text("position_embedding_type", "nope") == "rope" else tuple(layers)
        case _:
            return ()


def read_rotated_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a rotary embedding. In `no_rope_layers`, 1 stands for one that has."""
    if not fields.values.get("no_rope_layers"):  # published configs of Llama 4 have an empty list
        interval = fields.size("no_rope_layer_interval", maximum=1 << 30)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    marks = fields.id_list("no_rope_layers")
    if len(marks) < layers or not set(marks) <= {0, 1}:
        raise fields.invalid_error("no_rope_layers", f"a list of 0 or 1 for each of {layers} layers")
    return tuple(mark == 1 for mark in marks[:layers])
