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
from emberline.kernels.triton.jit import jit, jit_without_specializing, next_power_of_two, pdl_trigger_and_wait

COLUMNS = 64  # of a state in one program
KEPT_COLUMNS = 1024  # of a kept row in one program
WARP_VALUES = 4096  # of a state in the registers of one warp


@jit_without_specializing("first_row", "max_draft")
def _scan_tokens(
    mixed: tensor, steps: tensor, times: tensor, rates: tensor, time_bias: tensor, matrices: tensor, out: tensor,
    starts: tensor, context: tensor, slots: tensor,
    kept: tensor, places: tensor, accepted_counts: tensor, drafted_counts: tensor, save_slots: tensor, saves: tensor,
    max_draft: tensor, first_row: tensor, gate_stride: tensor, scale: tensor, eps: tensor,
    KEY_HEADS: constexpr, VALUE_HEADS: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr,
    KEYS: constexpr, COLUMNS: constexpr, DRAFTS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Advance some columns of a head's state over the tokens of a sequence, and compute their outputs.

    With DRAFTS, the state first advances over accepted drafts. The state before the drafted tokens is stored."""
    pdl_trigger_and_wait(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    begin = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - begin
    k = tl.arange(0, KEYS)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_k, has_v = k < KEY_DIM, v < VALUE_DIM
    column = head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    at = matrices + tl.load(slots + row).to(tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + column
    inside = has_k[:, None] & has_v[None, :]
    state = tl.load(at, inside & (tl.load(context + row) > 0) & (count > 0), 0.0)
    keys, channels = KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    q, value_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + k, 2 * keys + head * VALUE_DIM + v
    rate, bias = tl.load(rates + head), tl.load(time_bias + head)
    accepted, known, saved = 0, count, 0
    copy = at
    if DRAFTS:
        accepted, known = tl.load(accepted_counts + row), count - tl.load(drafted_counts + row)
        saved = tl.load(saves + row)
        copy = matrices + tl.load(save_slots + row).to(tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + column
        kept += tl.load(places + row).to(tl.int64) * max_draft * (channels + 2 * VALUE_HEADS)
        for t in range(accepted):
            gate, kept_times = channels + head, kept + VALUE_HEADS
            state, _ = _advance(
                state, kept + q, kept + value_at, keys, kept_times, kept, gate, rate, bias, has_k, has_v, scale, eps
            )
            if t + 1 == saved:
                tl.store(copy, state, inside)
            kept += channels + 2 * VALUE_HEADS
    mixed += begin * channels
    for t in range(count):
        gate = (begin + t) * gate_stride + head
        state, result = _advance(
            state, mixed + q, mixed + value_at, keys, times, steps, gate, rate, bias, has_k, has_v, scale, eps
        )
        tl.store(out + ((begin + t) * VALUE_HEADS + head) * VALUE_DIM + v, result.to(out.dtype.element_ty), has_v)
        if DRAFTS:
            if t + 1 == known:
                tl.store(at, state, inside)
            if accepted + t + 1 == saved:
                tl.store(copy, state, inside)
        mixed += channels
    if not DRAFTS:
        tl.store(at, state, inside & (count > 0))


@jit
def _advance(
    state: tensor, q_at: tensor, v_at: tensor, keys: tensor, times: tensor, steps: tensor, gate: tensor,
    rate: tensor, bias: tensor, has_k: tensor, has_v: tensor, scale: tensor, eps: tensor,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the state after a token, and the output of the token."""
    query = tl.load(q_at, has_k, 0.0).to(tl.float32)
    key = tl.load(q_at + keys, has_k, 0.0).to(tl.float32)
    value = tl.load(v_at, has_v, 0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    decay, step = load_decay_and_step(times, steps, rate, bias, gate, gate >= 0)
    state *= tl.exp(decay)
    change = step * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * change[None, :]
    return state, tl.sum(state * query[:, None], 0)


@jit_without_specializing("max_draft")
def _keep_rows(
    mixed: tensor, steps: tensor, times: tensor, kept: tensor, starts: tensor, places: tensor, drafted_counts: tensor,
    max_draft: tensor, gate_stride: tensor, CHANNELS: constexpr, HEADS: constexpr, BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Keep the rows of the drafted tokens of a sequence: queries, keys and values, then steps and times."""
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0)
    drafted, end = tl.load(drafted_counts + row), tl.load(starts + row + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = column - CHANNELS
    kept += tl.load(places + row).to(tl.int64) * max_draft * (CHANNELS + 2 * HEADS) + column
    for t in range(drafted):
        token = end - drafted + t
        value = tl.load(mixed + token * CHANNELS + column, column < CHANNELS, 0.0)
        value += tl.load(steps + token * gate_stride + head, (head >= 0) & (head < HEADS), 0.0)
        value += tl.load(times + token * gate_stride + head - HEADS, (head >= HEADS) & (head < 2 * HEADS), 0.0)
        tl.store(kept + t * (CHANNELS + 2 * HEADS), value, head < 2 * HEADS)


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
        if states.drafts is not None and states.drafts.has_any:
            keep_rows(mixed, gates, layer, states, pdl=pdl)
    if few < len(states.slots) and len(mixed):
        scan_chunks(mixed, gates, layer, states, out, pdl=pdl)
    return out


def scan_tokens(
    mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates, out: Tensor, rows: range, *, pdl: bool
) -> None:
    """Compute the outputs of the sequences `rows`, one token after the other."""
    drafts, kept = states.drafts, (*(states.slots,) * 6, 0)
    if drafts is not None:
        assert states.saves is not None and drafts.rule.is_contiguous() and drafts.rule.dtype is mixed.dtype
        kept = *(drafts.rule, drafts.draft_slots, drafts.accepted, drafts.counts), *states.saves, drafts.rule.shape[1]
    columns, keys = min(COLUMNS, next_power_of_two(layer.value_dim)), next_power_of_two(layer.key_dim)
    _scan_tokens[(-(-layer.value_dim // columns), layer.value_heads, len(rows))](
        mixed, gates.steps, gates.times, layer.rates, layer.time_bias, states.matrices, out,
        states.metadata.query_start, states.metadata.context, states.slots, *kept, rows.start, gates.steps.stride(0),
        layer.key_dim**-0.5, LENGTH_EPS, layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim,
        keys, columns, drafts is not None, pdl, num_warps=2 if keys * columns <= WARP_VALUES * 2 else 4, launch_pdl=pdl,
    )  # fmt: skip


def keep_rows(mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates, *, pdl: bool) -> None:
    """Keep the inputs of drafted tokens for the next step.

    This is a separate kernel, because programs of the other kernel may still read the inputs kept before."""
    drafts = states.drafts
    assert drafts is not None
    _keep_rows[(states.few_token_rows, -(-layer.draft_width // KEPT_COLUMNS))](
        mixed, gates.steps, gates.times, drafts.rule, states.metadata.query_start, drafts.draft_slots, drafts.counts,
        drafts.rule.shape[1], gates.steps.stride(0), layer.channels, layer.value_heads, KEPT_COLUMNS, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
