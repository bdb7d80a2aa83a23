"""Tables by position: of rotary cosines and sines, and of the temperature of queries.

One rotary table serves all requests, because cached keys cannot be rotated again when a sequence grows. In
transformers, two kinds of scaling depend on the length of the sequence. Here they depend on the configured context
instead, as if every sequence had that length:
  dynamic   The default context is the original one, for which nothing is scaled, as in transformers.
  longrope  If the configured context is at most the original one, the short factors are used, otherwise the long ones.
            Sequences that transformers would give the other factors get different results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emberline.models.attention_parts import QueryTemperature
from emberline.models.ropeconfig import RopeConfig


def make_cos_sin_table(rope: RopeConfig, context: int) -> Tensor:
    """Return float32[context, dim]: for each position the cosines, then the sines."""
    angles = torch.arange(context, dtype=torch.float32)[:, None] * compute_inverse_frequencies(rope, context)
    return torch.cat([angles.cos(), angles.sin()], dim=1).mul_(rope.attention_factor)


def make_query_scales(temperature: QueryTemperature, context: int) -> Tensor:
    """Return float32[context]: the factor of the queries at each position."""
    steps = torch.floor(torch.arange(1, context + 1, dtype=torch.float32) / temperature.interval)
    return steps.log1p_().mul_(temperature.strength).add_(1.0)


def compute_inverse_frequencies(rope: RopeConfig, context: int) -> Tensor:
    match rope.kind:
        case "linear":
            return _unscaled_frequencies(rope.theta, rope.dim) / rope.factor
        case "dynamic":
            return _unscaled_frequencies(_ntk_theta(rope, context), rope.dim)
        case "llama3":
            return _llama3_frequencies(rope)
        case "yarn":
            return _yarn_frequencies(rope)
        case "longrope":
            long = context > rope.original_context
            return _unscaled_frequencies(rope.theta, rope.dim) / torch.tensor(
                rope.long_factors if long else rope.short_factors
            )
        case _:
            return _unscaled_frequencies(rope.theta, rope.dim)


def _unscaled_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _ntk_theta(rope: RopeConfig, context: int) -> float:
    stretch = max(context, rope.original_context) / rope.original_context
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (rope.dim / (rope.dim - 2)))


def _llama3_frequencies(rope: RopeConfig) -> Tensor:
    """Return Llama 3's frequencies: low ones are divided by a factor, and high ones are kept.

    Frequencies between are interpolated, by their number of rotations within the original context. If the two limits
    are equal, as in Llama 4 Scout, there are none between.
    """
    plain = _unscaled_frequencies(rope.theta, rope.dim)
    rotations = rope.original_context * plain / (2 * math.pi)
    if rope.high_freq == rope.low_freq:
        kept = (rotations >= rope.low_freq).to(torch.float32)
    else:
        kept = ((rotations - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn_frequencies(rope: RopeConfig) -> Tensor:
    def dimension(rotations: float) -> float:
        """Return the index of the pair of dimensions with this many rotations within the original context."""
        return rope.dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    plain = _unscaled_frequencies(rope.theta, rope.dim)
    return plain / rope.factor * stretched + plain * (1 - stretched)
