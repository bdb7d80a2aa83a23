"""RopeConfig: the rotary position embedding of a model, with all defaults filled in.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from emberline.core.errors import UnsupportedModel
from emberline.models.architecture import Architecture
from emberline.models.fields import ConfigFields

MAX_CONTEXT_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class RopeConfig:
    dim: int  # number of leading dimensions of each head that are rotated
    theta: float
    original_context: int  # context in tokens before scaling
    kind: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq: float = 0.0  # llama3
    high_freq: float = 0.0
    beta_fast: float = 0.0  # yarn
    beta_slow: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()

    @staticmethod
    def from_hf(
        fields: ConfigFields,
        config: ConfigFields,
        head_dim: int,
        max_position: int,
        *,
        theta_field: str = "rope_theta",
        aliases: Mapping[str, str] | None = None,
    ) -> RopeConfig:
        """Read one set of rope parameters, `fields`.

        If `fields` has no rope_theta, the field `theta_field` of `config` is used. `aliases`: other names of kinds of
        scaling.
        """
        kind = fields.text("rope_type", fields.text("type", "default"))
        kind = (aliases or {}).get(kind, kind)
        if kind not in KINDS:
            raise UnsupportedModel(f"rope scaling {kind[:40]!r} is not supported", hint=f"supported: {' '.join(KINDS)}")
        fraction = fields.number("partial_rotary_factor", config.number("partial_rotary_factor"))
        dim = int(head_dim * fraction)
        if dim % 2 or not 2 <= dim <= head_dim:
            raise fields.invalid_error(
                "partial_rotary_factor", f"a fraction such that an even number of head_dim {head_dim} is rotated"
            )
        theta = fields.number("rope_theta", config.number(theta_field, minimum=1.001), minimum=1.001)
        original = fields.size("original_max_position_embeddings", max_position, maximum=MAX_CONTEXT_TOKENS)
        original = config.size("original_max_position_embeddings", original, maximum=MAX_CONTEXT_TOKENS)
        return KINDS[kind](RopeConfig(dim, theta, original, kind), fields, max_position)


class Ropes(NamedTuple):
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same as of the others
    score_factor: float = 1.0  # factor of attention scores, for models that scale them for a longer context


def read_ropes(config: ConfigFields, arch: Architecture, head_dim: int, max_position: int) -> Ropes:
    """Return the rotary embeddings.

    They are in rope_parameters (from transformers 5 on), or in rope_scaling and rope_theta (before that).
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if config.has_field(name)]
    if config.values.get("rope_scaling") == {}:
        names.remove("rope_scaling")
    fields = config.section(names[0]) if names else ConfigFields(arch.default_rope, config.where)
    if len(names) == 2 and fields.values != config.section(names[1]).values:
        raise UnsupportedModel(
            "config.json: rope_parameters and rope_scaling differ", hint="remove rope_scaling or make them equal"
        )
    is_nested = any(isinstance(value, dict) for value in fields.values.values())
    local = ConfigFields({}, fields.where)
    if is_nested != (arch.has_local_rope and names[:1] == ["rope_parameters"]):
        found = "different rope parameters per layer type are" if is_nested else "rope parameters for all layers are"
        raise UnsupportedModel(f"{fields.where}: {found} not supported for this model type")
    is_old_type = fields.has_field("type") and not fields.has_field("rope_type")
    if arch.has_local_rope and names == ["rope_scaling"] and is_old_type:
        raise UnsupportedModel(
            "config.json: rope_scaling has a type, which transformers ignores for this model type",
            hint="rename it to rope_type",
        )
    if is_nested:
        fields, local = fields.section("full_attention"), fields.section("sliding_attention")
    if arch.has_local_rope and any(each.values.get("truncate", True) is not True for each in (fields, local)):
        raise UnsupportedModel(
            f"{fields.where}: truncate is not true, which transformers ignores for this model type",
            hint="remove truncate if the model was trained with transformers",
        )
    rope = RopeConfig.from_hf(fields, config, head_dim, max_position, aliases=arch.rope_aliases)
    if not arch.partial_rotary and rope.dim != head_dim:
        raise UnsupportedModel(
            f"{fields.where}: partial_rotary_factor is {rope.dim / head_dim:g}; this model type rotates whole heads",
            hint="transformers ignores it: remove it if the model was trained with whole heads rotated",
        )
    if arch.latent_attention:
        return Ropes(rope, score_factor=_read_score_factor(fields, rope))
    if not arch.has_local_rope:
        return Ropes(rope)
    if arch.local_theta_field == "rope_theta" and not local.has_field("rope_theta"):
        _check_shared_theta(config, arch)
    local_rope = RopeConfig.from_hf(local, config, head_dim, max_position, theta_field=arch.local_theta_field)
    return Ropes(rope, None if local_rope == rope else local_rope)


def _check_shared_theta(config: ConfigFields, arch: Architecture) -> None:
    """Raise UnsupportedModel for a rope_theta that transformers ignores in the layers with a window."""
    theta, default = config.number("rope_theta"), arch.defaults["rope_theta"]
    if theta != default:
        raise UnsupportedModel(
            f"config.json sets rope_theta to {theta:g}; for this model type, transformers uses {default:g} in the "
            "layers with a window",
            hint="set rope_theta in rope_parameters, for full_attention and for sliding_attention",
        )


def _read_score_factor(fields: ConfigFields, rope: RopeConfig) -> float:
    """Return the factor by which DeepSeek models scale attention scores; others scale cosines and sines only."""
    whole = fields.number("mscale_all_dim", 0.0) if rope.kind != "default" else 0.0
    return _yarn_temperature(whole, rope.factor) ** 2 if whole else 1.0


def _read_unscaled(rope: RopeConfig, fields: ConfigFields, max_position: int) -> RopeConfig:
    return rope


def _read_linear_scaling(rope: RopeConfig, fields: ConfigFields, max_position: int) -> RopeConfig:
    return replace(rope, factor=fields.number("factor", minimum=1.0))


def _read_dynamic_scaling(rope: RopeConfig, fields: ConfigFields, max_position: int) -> RopeConfig:
    if rope.dim < 4:
        raise UnsupportedModel("dynamic rope scaling needs at least 4 rotated dimensions")
    return replace(rope, factor=fields.number("factor", minimum=1.0), original_context=max_position)


def _read_llama3_scaling(rope: RopeConfig, fields: ConfigFields, max_position: int) -> RopeConfig:
    low = fields.number("low_freq_factor", minimum=1e-6)
    high = fields.number("high_freq_factor")
    if high < low:
        raise fields.invalid_error("high_freq_factor", f"at least low_freq_factor, {low:g}")
    return replace(rope, factor=fields.number("factor", minimum=1.0), low_freq=low, high_freq=high)


def _yarn_temperature(scale: float, factor: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _read_yarn_scaling(rope: RopeConfig, fields: ConfigFields, max_position: int) -> RopeConfig:
    factor = fields.number("factor", max_position / rope.original_context, minimum=1.0)
    fast, slow = fields.number("beta_fast", 32.0, minimum=1e-6), fields.number("beta_slow", 1.0, minimum=1e-6)
    if fast < slow:
        raise fields.invalid_error("beta_fast", f"at least beta_slow, {slow:g}")

    whole, part = fields.number("mscale_all_dim", 0.0), fields.number("mscale", 0.0)
    usual = (
        _yarn_temperature(part, factor) / _yarn_temperature(whole, factor)
        if whole and part
        else _yarn_temperature(1.0, factor)
    )
    attention = fields.number("attention_factor", usual)
    truncate = fields.flag("truncate", "truncate" not in fields.values)  # transformers reads null as false
    return replace(rope, factor=factor, attention_factor=attention, beta_fast=fast, beta_slow=slow, truncate=truncate)


def _read_longrope_scaling(rope: RopeConfig, fields: ConfigFields, max_position: int) -> RopeConfig:
    if rope.original_context < 2:
        raise fields.invalid_error("original_max_position_embeddings", "at least 2")
    factor = fields.number("factor", max(1.0, max_position / rope.original_context), minimum=1.0)
    usual = math.sqrt(1 + math.log(factor) / math.log(rope.original_context))
    short, long = (fields.number_list(name, rope.dim // 2) for name in ("short_factor", "long_factor"))
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if min(factors) <= 0:
            raise fields.invalid_error(name, "a list of positive numbers")
    attention = fields.number("attention_factor", usual)
    return replace(rope, factor=factor, attention_factor=attention, short_factors=short, long_factors=long)


KINDS: dict[str, Callable[[RopeConfig, ConfigFields, int], RopeConfig]] = {
    "default": _read_unscaled,
    "linear": _read_linear_scaling,
    "dynamic": _read_dynamic_scaling,
    "llama3": _read_llama3_scaling,
    "yarn": _read_yarn_scaling,
    "longrope": _read_longrope_scaling,
}
