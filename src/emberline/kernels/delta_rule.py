"""The gated delta rule of recurrent layers: its arguments, and its meaning in plain torch.

Each value head of a sequence has a state, a matrix [key_dim, value_dim] S. For a token with the key k, the value v, the
query q, the decay d and the step size s:

    S = d * S;  S = S + k (s * (v - k S))^T;  output = q S

Queries, keys and values come out of a causal convolution over the tokens of a sequence, which treats each channel
separately. A slot is the memory for the states of one sequence. A sequence starts with states of zeros: the step with
its first tokens does not read its slot.

The last tokens of a sequence may be drafts of speculative decoding, and a state cannot be rolled back. So a step does
not advance states over drafted tokens. It keeps the inputs (k, v, d and s) of these tokens, which take 3 % of the size
of a state per token for Qwen3-Next, and the next step first advances the states over the accepted drafts. A step thus
reads and writes a state once, as without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    @property
    def draft_width(self) -> int:
        """How many numbers the delta rule keeps for each drafted token."""
        return self.channels + 2 * self.value_heads


class StateSaves(NamedTuple):
    """Tells after how many rows, and to which slots, a step copies the states of its sequences.

    The rows of a sequence are the accepted drafts of its previous step, then its tokens in this step."""

    slots: Tensor  # [B] int32: the slot to which the states of the sequence are copied
    after: Tensor  # [B] int32: how many of its rows the copied states include; 0: no copy


class StateDrafts(NamedTuple):
    """The inputs of drafted tokens, which a step keeps for the next step; ops overwrite them.

    A draft slot is the memory for the drafted tokens of one sequence."""

    conv: Tensor  # [draft slots, max_draft, channels] float32: inputs of the convolution
    rule: (
        Tensor  # [draft slots, max_draft, draft_width] float32: queries, keys, values; decay and step size of each head
    )
    draft_slots: Tensor  # [B] int32: the draft slot of each sequence
    accepted: Tensor  # [B] int32: kept rows over which the states advance before this step's tokens
    counts: Tensor  # [B] int32: drafted tokens at the end of the sequence, which replace the kept ones
    has_any: bool = True  # False: all `counts` are 0

    def of_layer(self, index: int) -> StateDrafts:
        """Return the drafts of one layer, if the first dimension of `conv` and `rule` is the layer."""
        return self._replace(conv=self.conv[index], rule=self.rule[index])


class LayerStates(NamedTuple):
    """The states of one layer, which ops overwrite, and the slots of the sequences of a step."""

    conv: Tensor  # [slots, kernel - 1, channels] float32: the last inputs of the convolution
    matrices: Tensor  # [slots, value_heads, key_dim, value_dim] float32
    slots: Tensor  # [B] int32: all different, except for padding, which shares a slot that no request has
    metadata: AttentionMetadata  # of which query_start and context are used
    saves: StateSaves | None = None
    drafts: StateDrafts | None = None  # None: no sequence has drafted tokens, nor had any in its previous step
    few_token_rows: int = 0  # leading sequences with one new token, or few, for kernels that compute these differently


class DeltaGates(NamedTuple):
    """For each token and value head, the numbers from which the step size and the decay are computed."""

    steps: Tensor  # [T, value_heads]: the step size is sigmoid(step)
    times: Tensor  # [T, value_heads]: the decay is exp(-rate * softplus(time + time_bias))


def convolve(x: Tensor, layer: DeltaLayer, states: LayerStates) -> Tensor:
    kernel, y = len(layer.conv_weight), torch.empty(len(x), layer.channels)
    for each in _iter_sequences(states):
        before = torch.zeros_like(states.conv[each.slot]) if each.is_new else states.conv[each.slot]
        rows = torch.cat([before, each.accepted_rows(states.drafts and states.drafts.conv), x[each.begin : each.end]])
        first, count = each.accepted, each.end - each.begin
        weighted = [weight * rows[first + at : first + at + count] for at, weight in enumerate(layer.conv_weight)]
        y[each.begin : each.end] = sum(weighted)
        for slot, num_rows in each.writes:
            states.conv[slot] = rows[num_rows : num_rows + kernel - 1]
        if states.drafts is not None:
            states.drafts.conv[each.draft_slot, : each.drafted] = x[each.end - each.drafted : each.end]
    return F.silu(y)


def compute_delta_rule(mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates) -> Tensor:
    rows, out = _prepare_rows(mixed, gates, layer), torch.empty(len(mixed), layer.value_heads, layer.value_dim)
    for each in _iter_sequences(states):
        state = torch.zeros_like(states.matrices[each.slot]) if each.is_new else states.matrices[each.slot].clone()
        accepted = each.accepted_rows(states.drafts and states.drafts.rule)
        for done, row in enumerate([*accepted, *rows[each.begin : each.end]], 1):
            output = _advance(state, row, layer)
            if done > each.accepted:
                out[each.begin + done - each.accepted - 1] = output
            for slot, num_rows in each.writes:
                if num_rows == done:
                    states.matrices[slot] = state
        if states.drafts is not None:
            states.drafts.rule[each.draft_slot, : each.drafted] = rows[each.end - each.drafted : each.end]
    return out.flatten(1)


def _prepare_rows(mixed: Tensor, gates: DeltaGates, layer: DeltaLayer) -> Tensor:
    """Return the queries, keys and values of each token, and the decay and step size of each head."""
    parts = mixed.split([layer.keys, layer.keys, layer.values], dim=1)
    q, k = (_divide_by_length(part.unflatten(1, (layer.key_heads, layer.key_dim))).flatten(1) for part in parts[:2])
    decays = (-layer.rates * F.softplus(gates.times + layer.time_bias)).exp()
    factors = torch.stack([decays, gates.steps.sigmoid()], dim=2).flatten(1)
    return torch.cat([q * layer.key_dim**-0.5, k, parts[2], factors], dim=1)


def _advance(state: Tensor, row: Tensor, layer: DeltaLayer) -> Tensor:
    """Advance a sequence's states in place by one token with the inputs `row`; return each value head's output."""
    *pair, values, factors = row.split([layer.keys, layer.keys, layer.values, 2 * layer.value_heads])
    repeats, heads = layer.value_heads // layer.key_heads, (layer.key_heads, layer.key_dim)
    q, k = (part.view(heads).repeat_interleave(repeats, dim=0)[..., None] for part in pair)
    decay, step = factors.view(-1, 2).unbind(1)
    state *= decay[:, None, None]
    found = (state * k).sum(1)
    state += k * (step[:, None] * (values.view(found.shape) - found))[:, None]
    output: Tensor = (state * q).sum(1)
    return output


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.view(len(x), -1, len(weight))
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight
    return x.copy_(normed.view(x.shape) * F.silu(gate))


def _divide_by_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)


class _Sequence(NamedTuple):
    slot: int
    begin: int  # its tokens are the rows [begin, end) of the step
    end: int
    is_new: bool  # it has no tokens before these
    writes: list[tuple[int, int]]  # slots to write its states to, each with the number of rows after which that is done
    draft_slot: int = 0
    accepted: int = 0
    drafted: int = 0

    def accepted_rows(self, drafts: Tensor | None) -> Tensor:
        return torch.empty(0) if drafts is None else drafts[self.draft_slot, : self.accepted]


def _iter_sequences(states: LayerStates) -> Iterator[_Sequence]:
    """Yield the sequences of a step. Padding, which has no tokens, is skipped."""
    starts, context = states.metadata.query_start.tolist(), states.metadata.context.tolist()
    saves = [(0, 0)] * len(context) if states.saves is None else _zip_tensors(*states.saves)
    drafts = [(0, 0, 0)] * len(context) if states.drafts is None else _zip_tensors(*states.drafts[2:5])
    for b, slot in enumerate(states.slots.tolist()):
        if starts[b] == starts[b + 1]:
            continue
        _, accepted, drafted = drafts[b]
        own = slot, accepted + starts[b + 1] - starts[b] - drafted
        writes = [saves[b], own] if saves[b][1] else [own]
        yield _Sequence(slot, starts[b], starts[b + 1], not context[b], writes, *drafts[b])


def _zip_tensors(*tensors: Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(tensor.tolist() for tensor in tensors), strict=True))
