"""convolve: the causal convolution of recurrent layers, which treats each channel separately.

The last inputs of a sequence are stored in its slot for the next step. In one kernel, no program may read a slot that
another program writes. The tokens of a prompt chunk are computed by many programs, so a second kernel stores the last
inputs of the chunk. A sequence with few tokens is computed by one program for each block of channels, which also stores
the last inputs.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.delta_rule import DeltaLayer, LayerStates
from emberline.kernels.triton.jit import jit, jit_without_specializing, pdl_trigger_and_wait

ROW_CHANNELS = 256  # channels of a program that computes whole sequences
TILE_TOKENS, TILE_CHANNELS = 32, 64  # of a program that computes a part of the tokens of chunks
SEARCHED_ROWS: constexpr = constexpr(64)  # rows of a step that are compared with the tokens of a program at a time


@jit_without_specializing("first_row", "max_draft")
def _convolve_rows(
    x: tensor, weight: tensor, conv: tensor, y: tensor, starts: tensor, context: tensor, slots: tensor,
    kept: tensor, places: tensor, accepted_counts: tensor, drafted_counts: tensor, save_slots: tensor, saves: tensor,
    max_draft: tensor, first_row: tensor, x_stride: tensor,
    KERNEL: constexpr, CHANNELS: constexpr, BLOCK: constexpr, COMPUTES: constexpr, DRAFTS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Compute all tokens of a sequence, unless COMPUTES is False, and keep its last inputs.

    With DRAFTS, accepted drafts of the previous step come before the sequence's tokens. The last of its tokens may be
    drafts, whose inputs then replace those of the previous drafts."""
    pdl_trigger_and_wait(PDL)
    row = first_row + tl.program_id(0)
    begin = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - begin
    is_old = tl.load(context + row) > 0
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    state = conv + tl.load(slots + row).to(tl.int64) * ((KERNEL - 1) * CHANNELS) + channel
    first = x + begin * x_stride + channel
    accepted, drafted, saved = 0, 0, 0
    if DRAFTS:
        accepted, drafted, saved = tl.load(accepted_counts + row), tl.load(drafted_counts + row), tl.load(saves + row)
        kept += tl.load(places + row).to(tl.int64) * max_draft * CHANNELS + channel
    if COMPUTES:
        for t in range(count):
            total = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(KERNEL):
                at = t + j - (KERNEL - 1)
                value = _load_input(
                    first, state, kept, at, x_stride, accepted, is_old, inside, KERNEL, CHANNELS, DRAFTS
                )
                total += tl.load(weight + j * CHANNELS + channel, inside, 0.0) * value
            result = total / (1.0 + tl.exp(-total))
            tl.store(y + (begin + t) * CHANNELS + channel, result.to(y.dtype.element_ty), inside)
    if DRAFTS:
        copy = conv + tl.load(save_slots + row).to(tl.int64) * ((KERNEL - 1) * CHANNELS) + channel
        for j in tl.static_range(KERNEL - 1):
            at = saved - accepted + j - (KERNEL - 1)
            value = _load_input(first, state, kept, at, x_stride, accepted, is_old, inside, KERNEL, CHANNELS, DRAFTS)
            tl.store(copy + j * CHANNELS, value, inside & (saved > 0))
    # A thread has the same channel of all inputs, and these move to lower indices, so none is overwritten too early.
    for j in tl.static_range(KERNEL - 1):
        at = count - drafted + j - (KERNEL - 1)
        value = _load_input(first, state, kept, at, x_stride, accepted, is_old, inside, KERNEL, CHANNELS, DRAFTS)
        tl.store(state + j * CHANNELS, value, inside & (count > 0))
    if DRAFTS:
        for t in range(drafted):
            tl.store(kept + t * CHANNELS, tl.load(first + (count - drafted + t) * x_stride, inside, 0.0), inside)


@jit
def _load_input(
    first: tensor, state: tensor, kept: tensor, at: tensor, x_stride: tensor, accepted: tensor, is_old: tensor,
    inside: tensor, KERNEL: constexpr, CHANNELS: constexpr, DRAFTS: constexpr,
) -> tensor:  # fmt: skip
    """Return the inputs at an index, which is negative for tokens before the first of the step."""
    value = tl.load(first + at * x_stride, inside & (at >= 0), 0.0).to(tl.float32)
    if DRAFTS:
        value += tl.load(kept + (at + accepted) * CHANNELS, inside & (at < 0) & (at >= -accepted), 0.0).to(tl.float32)
        at += accepted
    return value + tl.load(state + (at + (KERNEL - 1)) * CHANNELS, inside & is_old & (at < 0), 0.0)


@jit_without_specializing("rows", "first_row")
def _convolve_tokens(
    x: tensor, weight: tensor, conv: tensor, y: tensor, starts: tensor, context: tensor, slots: tensor,
    rows: tensor, first_row: tensor, x_stride: tensor,
    KERNEL: constexpr, CHANNELS: constexpr, TOKENS: constexpr, BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Compute tokens of the sequences from `first_row` on."""
    pdl_trigger_and_wait(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    found = tl.zeros((TOKENS,), tl.int32)  # the row of each token; `rows` for padding
    for at in range(0, rows, SEARCHED_ROWS):
        row = at + tl.arange(0, SEARCHED_ROWS)
        ends = tl.load(starts + 1 + row, row < rows, 2147483647)
        found += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    is_used = (found >= first_row) & (found < rows)
    index = token - tl.load(starts + found, is_used, 0)
    is_old = (tl.load(context + found, is_used, 0) > 0)[:, None]
    slot = tl.load(slots + found, is_used, 0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = is_used[:, None] & (channel < CHANNELS)
    first = x + token.to(tl.int64)[:, None] * x_stride + channel
    state = conv + slot[:, None] * ((KERNEL - 1) * CHANNELS) + channel
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for j in tl.static_range(KERNEL):
        at = (index + j - (KERNEL - 1))[:, None]
        new = tl.load(first + (j - (KERNEL - 1)) * x_stride, inside & (at >= 0), 0.0).to(tl.float32)
        old = tl.load(state + (at + (KERNEL - 1)) * CHANNELS, inside & is_old & (at < 0), 0.0)
        total += tl.load(weight + j * CHANNELS + channel, channel < CHANNELS, 0.0) * (new + old)
    result = total / (1.0 + tl.exp(-total))
    tl.store(y + token.to(tl.int64)[:, None] * CHANNELS + channel, result.to(y.dtype.element_ty), inside)


def convolve(x: Tensor, layer: DeltaLayer, states: LayerStates, *, pdl: bool = False) -> Tensor:
    """Return the silu of the convolution in the dtype of x; the rows of padding tokens are not written."""
    kernel, channels = layer.conv_weight.shape
    assert x.stride(1) == 1 and x.shape[1] == channels and states.conv.is_contiguous()
    y = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    rows, few = len(states.slots), states.few_token_rows
    sizes = x.stride(0), kernel, channels
    step = x, layer.conv_weight, states.conv, y, states.metadata.query_start, states.metadata.context, states.slots
    blocks, drafts = -(-channels // ROW_CHANNELS), states.drafts
    nothing = *(states.slots,) * 6, 0
    if few:
        kept = nothing
        if drafts is not None:
            assert states.saves is not None and drafts.conv.is_contiguous() and drafts.conv.dtype is x.dtype
            kept = (
                *(drafts.conv, drafts.draft_slots, drafts.accepted, drafts.counts),
                *states.saves,
                drafts.conv.shape[1],
            )
        _convolve_rows[(few, blocks)](
            *step, *kept, 0, *sizes, ROW_CHANNELS, True, drafts is not None, pdl, num_warps=4, launch_pdl=pdl
        )
    if few < rows and len(x):
        _convolve_tokens[(-(-len(x) // TILE_TOKENS), -(-channels // TILE_CHANNELS))](
            *step, rows, few, *sizes, TILE_TOKENS, TILE_CHANNELS, pdl, num_warps=4, launch_pdl=pdl
        )
        if kernel > 1:
            grid = rows - few, blocks
            _convolve_rows[grid](
                *step, *nothing, few, *sizes, ROW_CHANNELS, False, False, pdl, num_warps=4, launch_pdl=pdl
            )
    return y
