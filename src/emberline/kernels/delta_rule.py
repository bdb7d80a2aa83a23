"""The gated delta rule of recurrent layers: its arguments, and its meaning in plain torch.

Each value head of a sequence has a state, a matrix [key_dim, value_dim] S. For a token with the key k, the value v, the
query q, the decay d and the step size s:

    S = d * S;  S = S + k (s * (v - k S))^T;  output = q S

Queries, keys and values come out of a causal convolution over the tokens of a sequence, of each channel by itself. A
sequence starts with zeros: what its slots contain is not read while it has no tokens before these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.arguments import AttentionMetadata

LENGTH_EPS = 1e-6  # added to the squared lengths by which queries and keys are divided


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    key_heads: int
    value_heads: int  # a multiple of key_heads; consecutive ones share a key head
    key_dim: int
    value_dim: int
    conv_weight: Tensor  # [kernel, channels] float32
    rates: Tensor  # [value_heads] float32: factors of the time that a token takes, in the exponent of its decay
    time_bias: Tensor  # [value_heads] float32, added to that time

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values


class LayerStates(NamedTuple):
    """The states of one layer, which ops overwrite, and the slots of the sequences of a step."""

    conv: Tensor  # [slots, kernel - 1, channels] float32: the last inputs of the convolution
    matrices: Tensor  # [slots, value_heads, key_dim, value_dim] float32
    slots: Tensor  # [B] int32: all different, except for padding, which shares a slot that no request has
    metadata: AttentionMetadata  # of which query_start and context are used
    few_token_rows: int = 0  # leading sequences with one new token, or few, for kernels that compute these differently


class DeltaGates(NamedTuple):
    """Projections of each token, one number for each value head."""

    steps: Tensor  # [T, value_heads]: the step size is the sigmoid
    times: Tensor  # [T, value_heads]: the decay is exp(-rate * softplus(time + time_bias))


def convolve(x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
    kernel = len(layer.conv_weight)
    y = torch.empty(len(x), layer.channels)
    for slot, begin, end, is_new in _iter_sequences(states):
        before = states.conv[slot]
        rows = torch.cat([torch.zeros_like(before) if is_new else before, x[begin:end]])
        y[begin:end] = sum(weight * rows[at : at + end - begin] for at, weight in enumerate(layer.conv_weight))
        states.conv[slot] = rows[len(rows) - kernel + 1 :]
    return F.silu(y)


def compute_delta_rule(mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
    queries, keys, values = mixed.split([layer.keys, layer.keys, layer.values], dim=1)
    repeats = layer.value_heads // layer.key_heads
    q, k = (
        _divide_by_length(part.reshape(len(mixed), layer.key_heads, layer.key_dim)).repeat_interleave(repeats, dim=1)
        for part in (queries, keys)
    )
    q, v = q * layer.key_dim**-0.5, values.reshape(len(mixed), layer.value_heads, layer.value_dim)
    decays = (-layer.rates * F.softplus(gates.times + layer.time_bias)).exp()
    steps, out = gates.steps.sigmoid(), torch.empty(len(mixed), layer.value_heads, layer.value_dim)
    for slot, begin, end, is_new in _iter_sequences(states):
        state = torch.zeros_like(states.matrices[slot]) if is_new else states.matrices[slot].clone()
        for t in range(begin, end):
            state *= decays[t, :, None, None]
            found = (state * k[t, :, :, None]).sum(1)
            state += k[t, :, :, None] * (steps[t, :, None] * (v[t] - found))[:, None]
            out[t] = (state * q[t, :, :, None]).sum(1)
        states.matrices[slot] = state
    return out.flatten(1)


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.view(len(x), -1, len(weight))
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight
    return x.copy_(normed.view(x.shape) * F.silu(gate))


def _divide_by_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)


def _iter_sequences(states: LayerStates) -> list[tuple[int, int, int, bool]]:
    """Return for each sequence its slot, its rows [begin, end), and whether it has no tokens before these.

    Padding, which has no rows, is left out."""
    starts, context = states.metadata.query_start.tolist(), states.metadata.context.tolist()
    spans = zip(states.slots.tolist(), starts[:-1], starts[1:], context, strict=True)
    return [(slot, begin, end, not before) for slot, begin, end, before in spans if begin < end]
