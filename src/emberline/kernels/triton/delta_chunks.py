"""scan_chunks: the gated delta rule for chunks of prompts, 64 tokens at a time, as products of matrices.

For the tokens t of a block, let G be the sums of the logarithms of decays up to each token, and S the state before the
block. The changes d that tokens make to the state are the solution of a triangular system:

    d_t = step_t * (v_t - exp(G_t) k_t S - sum over s < t of exp(G_t - G_s) (k_t k_s) d_s)

so d = U - W S, where U and W do not depend on the state: a first kernel computes them for all blocks at the same time.
A second one goes through the blocks of a sequence, with some columns of the state in registers:

    output_t = exp(G_t) q_t S + sum over s <= t of exp(G_t - G_s) (q_t k_s) d_s
    S = exp(G_last) S + sum over s of exp(G_last - G_s) k_s d_s^T
"""

from __future__ import annotations

from math import prod

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.delta_rule import LENGTH_EPS, DeltaGates, DeltaLayer, LayerStates
from emberline.kernels.triton.delta_gates import load_decay_and_step
from emberline.kernels.triton.jit import jit, jit_without_specializing, next_power_of_two, pdl_trigger_and_wait
from emberline.kernels.triton.linear import count_sms

BLOCK_TOKENS = 64
PART_TOKENS: constexpr = constexpr(16)  # of the parts of a block whose systems are solved row by row
MIN_DOT_SIZE = 16  # of each side of a matrix in a product
MAX_COLUMNS = 32  # of a state in one program
# Columns of W and U in one product, at least. With fewer, ptxas 12.8 gives products of 16 rows or more a wrong address
# in shared memory: that of the tile in bytes, where the hardware expects it divided by 16.
MIN_SOLVED_COLUMNS = 64
MAX_PIPELINED_KEYS = 128  # size of keys up to which shared memory holds the tiles of two or three blocks
SEARCHED_ROWS: constexpr = constexpr(64)  # rows of a step that are compared with a program's block at a time


@jit_without_specializing("first_row", "rows")
def _normalize(
    mixed: tensor, starts: tensor, first_row: tensor, rows: tensor, scale: tensor, eps: tensor,
    CHANNELS: constexpr, KEY_HEADS: constexpr, KEY_DIM: constexpr, KEYS: constexpr, TILE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Divide the queries and keys of chunks by their lengths, in place."""
    pdl_trigger_and_wait(PDL)
    token = tl.load(starts + first_row).to(tl.int64) + tl.program_id(0)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    column = tl.arange(0, KEYS)[None, :]
    inside = (head < 2 * KEY_HEADS) & (column < KEY_DIM) & (token < tl.load(starts + rows))
    at = mixed + token * CHANNELS + head * KEY_DIM + column
    value = tl.load(at, inside, 0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) + eps)[:, None] * tl.where(head < KEY_HEADS, scale, 1.0)
    tl.store(at, (value * factor).to(mixed.dtype.element_ty), inside)


@jit
def _find_block(
    starts: tensor, first_row: tensor, rows: tensor, number: tensor, TOKENS: constexpr
) -> tuple[tensor, tensor]:
    """Return the first token of block `number`, and its number of tokens; 0: there is no such block."""
    row, before, end = first_row, 0, 0
    for at in range(first_row, rows, SEARCHED_ROWS):
        each = at + tl.arange(0, SEARCHED_ROWS)
        counts = tl.load(starts + each + 1, each < rows, 0) - tl.load(starts + each, each < rows, 0)
        ends = end + tl.cumsum((counts + TOKENS - 1) // TOKENS, 0)
        is_passed = (ends <= number) & (each < rows)
        row += tl.sum(is_passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_passed, ends, 0), 0))
        end = tl.max(ends, 0)
    exists = row < rows
    begin = tl.load(starts + row, exists, 0) + (number - before) * TOKENS
    last = tl.load(starts + row + 1, exists, 0)
    return begin.to(tl.int64), tl.where(exists, tl.minimum(last - begin, TOKENS), 0)


@jit
def _invert(lower: tensor, TOKENS: constexpr, PRECISION: constexpr) -> tensor:
    """Return the inverse of I + lower, where `lower` has numbers below the diagonal only."""
    PARTS: constexpr = TOKENS // PART_TOKENS
    parts = tl.reshape(lower, (PARTS, PART_TOKENS, PARTS, PART_TOKENS))
    part = tl.arange(0, PARTS)
    is_diagonal = part[:, None, None, None] == part[None, None, :, None]
    diagonal = tl.sum(tl.where(is_diagonal, parts, 0.0), 2)
    row = tl.arange(0, PART_TOKENS)
    inverse = tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, 0.0) + tl.zeros_like(diagonal)
    for i in range(1, PART_TOKENS):
        is_row = (row == i)[None, :, None]
        factors = tl.sum(tl.where(is_row, diagonal, 0.0), 1)
        found = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - found[:, None, :], inverse)
    blocks = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), (TOKENS, TOKENS))
    # With D for the inverse of the diagonal parts and L for the others, it is (I + M)^-1 D for M = D L, and M^4 = 0.
    others = tl.reshape(tl.where(is_diagonal, 0.0, parts), (TOKENS, TOKENS))
    m = tl.dot(blocks, others, input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    first = blocks - tl.dot(m, blocks, input_precision=PRECISION)
    # (I + M)^-1 is (I + M^2) (I - M).
    return first + tl.dot(square, first, input_precision=PRECISION)


@jit_without_specializing("first_row", "rows")
def _solve_blocks(
    mixed: tensor, steps: tensor, times: tensor, rates: tensor, time_bias: tensor, w: tensor, u: tensor,
    starts: tensor, first_row: tensor, rows: tensor, gate_stride: tensor,
    KEY_HEADS: constexpr, VALUE_HEADS: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr,
    KEYS: constexpr, COLUMNS: constexpr, TOKENS: constexpr, PRECISION: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Compute W and U of one block and value head."""
    pdl_trigger_and_wait(PDL)
    head = tl.program_id(1)
    begin, count = _find_block(starts, first_row, rows, tl.program_id(0), TOKENS)
    t, k = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    token, is_used = begin + t, t < count
    channels: constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    has_key = is_used[:, None] & (k < KEY_DIM)[None, :]
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    at = mixed + token[:, None] * channels + (KEY_HEADS + key_head) * KEY_DIM + k[None, :]
    key = tl.load(at, has_key, 0.0)
    gate = token * gate_stride + head
    rate, bias = tl.load(rates + head), tl.load(time_bias + head)
    decay, step = load_decay_and_step(times, steps, rate, bias, gate, is_used)
    sums = tl.cumsum(tl.where(is_used, decay, 0.0), 0)
    step = tl.where(is_used, step, 0.0)
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    is_before = t[:, None] > t[None, :]
    factor = step[:, None] * tl.exp(tl.where(is_before, sums[:, None] - sums[None, :], 0.0))
    inverse = _invert(tl.where(is_before, products * factor, 0.0), TOKENS, PRECISION)
    inverse = inverse.to(mixed.dtype.element_ty)
    scaled = (key.to(tl.float32) * (step * tl.exp(sums))[:, None]).to(mixed.dtype.element_ty)
    result = tl.dot(inverse, scaled, input_precision=PRECISION)
    to = token[:, None] * VALUE_HEADS + head
    tl.store(w + to * KEY_DIM + k[None, :], result.to(w.dtype.element_ty), has_key)
    for first in range(0, VALUE_DIM, COLUMNS):
        v = first + tl.arange(0, COLUMNS)
        has_value = is_used[:, None] & (v < VALUE_DIM)[None, :]
        value_at = mixed + token[:, None] * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v[None, :]
        value = (tl.load(value_at, has_value, 0.0).to(tl.float32) * step[:, None]).to(mixed.dtype.element_ty)
        solved = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(u + to * VALUE_DIM + v[None, :], solved.to(u.dtype.element_ty), has_value)


@jit_without_specializing("first_row")
def _scan_blocks(
    mixed: tensor, steps: tensor, times: tensor, rates: tensor, time_bias: tensor, w: tensor, u: tensor,
    matrices: tensor, out: tensor, starts: tensor, context: tensor, slots: tensor, first_row: tensor,
    gate_stride: tensor,
    KEY_HEADS: constexpr, VALUE_HEADS: constexpr, KEY_DIM: constexpr, VALUE_DIM: constexpr,
    KEYS: constexpr, COLUMNS: constexpr, TOKENS: constexpr, PRECISION: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Compute the outputs of one sequence in some columns of a value head, and advance its state."""
    pdl_trigger_and_wait(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    begin, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    t, k = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    channels: constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    matrix = tl.load(slots + row).to(tl.int64) * VALUE_HEADS + head
    state_at = matrices + matrix * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    has_state = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :] & (begin < end)
    state = tl.load(state_at, has_state & (tl.load(context + row) > 0), 0.0)
    rate, bias = tl.load(rates + head), tl.load(time_bias + head)
    TYPE: constexpr = mixed.dtype.element_ty
    for first in range(begin, end, TOKENS):
        token = first + t
        is_used = token < end
        has_key, has_value = is_used[:, None] & (k < KEY_DIM)[None, :], is_used[:, None] & (v < VALUE_DIM)[None, :]
        at = mixed + token[:, None] * channels + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + k[None, :]
        query = tl.load(at, has_key, 0.0)
        key = tl.load(at + KEY_HEADS * KEY_DIM, has_key, 0.0)
        to = token[:, None] * VALUE_HEADS + head
        factors = tl.load(w + to * KEY_DIM + k[None, :], has_key, 0.0)
        changes = tl.load(u + to * VALUE_DIM + v[None, :], has_value, 0.0).to(tl.float32)
        gate = token * gate_stride + head
        decay, _ = load_decay_and_step(times, steps, rate, bias, gate, is_used)
        decay = tl.where(is_used, decay, 0.0)
        sums, total = tl.cumsum(decay, 0), tl.sum(decay, 0)
        rounded = state.to(TYPE)
        changes -= tl.dot(factors, rounded, input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        is_seen = t[:, None] >= t[None, :]
        scores *= tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0))
        scores = tl.where(is_seen, scores, 0.0).to(TYPE)
        result = tl.dot(query, rounded, input_precision=PRECISION) * tl.exp(sums)[:, None]
        result += tl.dot(scores, changes.to(TYPE), input_precision=PRECISION)
        tl.store(out + to * VALUE_DIM + v[None, :], result.to(out.dtype.element_ty), has_value)
        kept = (changes * tl.exp(total - sums)[:, None]).to(TYPE)
        state = state * tl.exp(total) + tl.dot(tl.trans(key), kept, input_precision=PRECISION)
    tl.store(state_at, state, has_state)


def scan_chunks(
    mixed: Tensor, gates: DeltaGates, layer: DeltaLayer, states: LayerStates, out: Tensor, *, pdl: bool = False
) -> None:
    """Compute the outputs of all sequences but the first `few_token_rows`; their queries and keys are overwritten."""
    few, rows, tokens = states.few_token_rows, len(states.slots), len(mixed)
    starts, (steps, times) = states.metadata.query_start, gates
    keys = max(MIN_DOT_SIZE, next_power_of_two(layer.key_dim))
    columns = min(MAX_COLUMNS, max(MIN_DOT_SIZE, next_power_of_two(layer.value_dim)))
    tile = min(max(1, 1024 // keys), next_power_of_two(2 * layer.key_heads))
    _normalize[(tokens, -(-2 * layer.key_heads // tile))](
        mixed, starts, few, rows, layer.key_dim**-0.5, LENGTH_EPS, layer.channels, layer.key_heads, layer.key_dim, keys,
        tile, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    w = torch.empty((tokens, layer.value_heads, layer.key_dim), dtype=mixed.dtype, device=mixed.device)
    u = torch.empty((tokens, layer.value_heads, layer.value_dim), dtype=mixed.dtype, device=mixed.device)
    sizes = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
    solved = max(keys, MIN_SOLVED_COLUMNS), MIN_SOLVED_COLUMNS
    # Precision of products of float32. With bf16 activations, only inverses are such products, and are rounded later.
    is_bf16 = mixed.dtype is torch.bfloat16
    precision = "tf32" if is_bf16 else "tf32x3"
    common = mixed, steps, times, layer.rates, layer.time_bias, w, u
    _solve_blocks[(tokens // BLOCK_TOKENS + rows - few, layer.value_heads)](
        *common, starts, few, rows, steps.stride(0), *sizes, *solved, BLOCK_TOKENS, precision, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    programs = -(-layer.value_dim // columns), layer.value_heads, rows - few
    stages = 1
    if is_bf16 and keys <= MAX_PIPELINED_KEYS:  # with three stages, a multiprocessor has memory for one program only
        stages = 3 if prod(programs) <= count_sms(mixed.device) else 2
    _scan_blocks[programs](
        *common, states.matrices, out, starts, states.metadata.context, states.slots, few, steps.stride(0), *sizes,
        keys, columns, BLOCK_TOKENS, precision, pdl, num_warps=4, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
