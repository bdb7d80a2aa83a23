"""compute_delta_rule: the gated delta rule of recurrent layers; see kernels/delta_rule.py.

Sequences with few tokens are computed token by token: a program has some columns of the state of one value head in
registers, reads them once and writes them once. Chunks of prompts are computed by `delta_chunks.py`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.delta_rule import LENGTH_EPS, DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.triton.delta_chunks import scan_chunks
from emberline.kernels.triton.delta_gates import load_decay_and_step
from emberline.kernels.triton.jit import jit_without_specializing, next_power_of_two, pdl_trigger_and_wait

COLUMNS = 64  # of a state in one program
WARP_VALUES = 4096  # of a state in the registers of one warp


@jit_without_specializing("first_row")
def _scan_tokens(
    mixed: tensor, steps: tensor, times: tensor, rates: tensor, time_bias: tensor, matrices: tensor, out: tensor,
    starts: tensor, context: tensor, slots: tensor, first_row: tensor, gate_stride: tensor, scale: tensor, eps: tensor,
    KEY_HEADS: constexpr, VALUE_HEADS: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr,
    KEYS: constexpr, COLUMNS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    begin = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - begin
    k = tl.arange(0, KEYS)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_k, has_v = k < KEY_DIM, v < VALUE_DIM
    matrix = tl.load(slots + row).to(tl.int64) * VALUE_HEADS + head
    at = matrices + matrix * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    inside = has_k[:, None] & has_v[None, :]
    state = tl.load(at, inside & (tl.load(context + row) > 0) & (count > 0), 0.0)
    keys, channels = KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    q_at = mixed + begin * channels + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + k
    v_at = mixed + begin * channels + 2 * keys + head * VALUE_DIM + v
    rate, bias = tl.load(rates + head), tl.load(time_bias + head)
    for t in range(count):
        query = tl.load(q_at, has_k, 0.0).to(tl.float32)
        key = tl.load(q_at + keys, has_k, 0.0).to(tl.float32)
        value = tl.load(v_at, has_v, 0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        gate = (begin + t) * gate_stride + head
        decay, step = load_decay_and_step(times, steps, rate, bias, gate, gate >= 0)
        state *= tl.exp(decay)
        change = step * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * change[None, :]
        result = tl.sum(state * query[:, None], 0)
        tl.store(out + ((begin + t) * VALUE_HEADS + head) * VALUE_DIM + v, result.to(out.dtype.element_ty), has_v)
        q_at += channels
        v_at += channels
    tl.store(at, state, inside & (count > 0))


def compute_delta_rule(
    mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates, *, pdl: bool = False
) -> Tensor:
    """Return the outputs in the dtype of `mixed`; the rows of padding tokens are not written."""
    steps, times = gates
    assert mixed.is_contiguous() and mixed.shape[1] == layer.channels and states.matrices.is_contiguous()
    assert steps.stride() == times.stride() and steps.stride(1) == 1
    out = torch.empty((len(mixed), layer.values), dtype=mixed.dtype, device=mixed.device)
    if few := states.few_token_rows:
        scan_tokens(mixed, gates, layer, states, out, range(few), pdl=pdl)
    if few < len(states.slots) and len(mixed):
        scan_chunks(mixed, gates, layer, states, out, pdl=pdl)
    return out


def scan_tokens(
    mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates, out: Tensor, rows: range, *, pdl: bool
) -> None:
    """Compute the outputs of some sequences, one token after the other."""
    columns, keys = min(COLUMNS, next_power_of_two(layer.value_dim)), next_power_of_two(layer.key_dim)
    _scan_tokens[(-(-layer.value_dim // columns), layer.value_heads, len(rows))](
        mixed, gates.steps, gates.times, layer.rates, layer.time_bias, states.matrices, out,
        states.metadata.query_start, states.metadata.context, states.slots, rows.start, gates.steps.stride(0),
        layer.key_dim**-0.5, LENGTH_EPS, layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim,
        keys, columns, pdl, num_warps=2 if keys * columns <= WARP_VALUES * 2 else 4, launch_pdl=pdl,
    )  # fmt: skip
