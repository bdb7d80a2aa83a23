"""Every op in plain torch: the definition for tests, and the fallback without a compiler.

All activations are float32. Positions and block tables are int32, slots and ids int64. `k_cache` and `v_cache` are
[blocks, kv_heads, block_size, head_dim]. Within a block the keys are stored as [head_dim][block_size], which is the
panel layout that the product with queries reads. Only these ops depend on the layout inside a block. block_size is at
least 8, and divides 64 or is a multiple of it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.dense_stack import DenseStack
from emberline.kernels.packed_weight import PackedWeight

MAX_TOKEN_COUNT = 0x7FFF  # most occurrences of one token in one output that penalties count
IN_PROMPT_BIT = -0x8000  # bit of a 16-bit count: the prompt contains the token


def pack_linear(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    n, k = weight.shape
    return PackedWeight(weight.to(torch.float32, copy=True).contiguous(), n, k, weight.dtype, gated=gated)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight


def linear(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return y = norm(x) @ W^T + bias. With `add_to`, add y to it in place and return it."""
    x = x if norm is None else rms_norm(x, norm, eps)
    y = F.linear(x, w.data, bias)
    return _store(out, y) if add_to is None else add_to.add_(y)


def gate_up_silu(
    x: Tensor, w: PackedWeight, *, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """Return silu(x Wg^T) * (x Wu^T); `w` was packed with gated=True from gate rows, then up rows."""
    assert w.gated, "pack the gate and up rows with gated=True"
    gate, up = linear(x, w, norm=norm, eps=eps).chunk(2, dim=-1)
    return _store(out, F.silu(gate) * up)


def embed(ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    rows = table.data if isinstance(table, PackedWeight) else table
    return rows[ids].float()


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate q inside `qkv`, and write the rotated k and v into the cache.

    A token's slot is block * block_size + offset; -1 means that it is not cached.
    """
    block_size = v_cache.shape[2]
    heads = qkv.view(len(qkv), q_heads + 2 * kv_heads, head_dim)
    q, k, v = heads[:, :q_heads], heads[:, q_heads:-kv_heads], heads[:, -kv_heads:]
    q.copy_(_rotate(q if q_norm is None else rms_norm(q, q_norm, eps), positions, cos_sin))
    k = _rotate(k if k_norm is None else rms_norm(k, k_norm, eps), positions, cos_sin)
    kept = slots >= 0
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    _k_panels(k_cache)[block, :, :, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, :, offset] = v[kept].to(v_cache.dtype)


def paged_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    scale: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
) -> Tensor:
    """Return causal attention of each sequence's new queries over its cached keys, new ones included.

    Sequence b has the queries [query_start[b], query_start[b+1]). Its i-th query has position p = context[b] + i and
    attends to the keys in (p - window, p], or [0, p] if window is 0.
    """
    tokens = len(qkv)
    out = qkv.new_empty(tokens, q_heads * head_dim)
    q = qkv.view(tokens, -1, head_dim)[:, :q_heads]
    starts = query_start.tolist()
    for b, before in enumerate(context.tolist()):
        first, last = starts[b], starts[b + 1]
        length = before + last - first
        blocks = block_tables[b, : -(-length // v_cache.shape[2])].long()
        k = _k_panels(k_cache)[blocks].permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, :length].float()
        v = v_cache[blocks].permute(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)[:, :length].float()
        group = q_heads // kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q[first:last].transpose(0, 1) @ k.transpose(1, 2) * scale
        key, position = torch.arange(length), torch.arange(before, length)[:, None]
        hidden = (key > position) | ((key <= position - window) if window else torch.tensor(False))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:last] = (weights @ v).transpose(0, 1).reshape(last - first, q_heads * head_dim)
    return out


def run_dense_layers(
    x: Tensor,
    stack: DenseStack,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context: Tensor,
    rows: Tensor,
) -> Tensor:
    """Run x through the stack's layers in place, with the same ops in the same order as one by one.

    `keys` and `values` are the caches of all layers. After the last layer's keys are cached, only `rows` are computed
    further; they are the result.
    """
    heads = stack.heads
    for layer, k, v in zip(stack.layers, keys, values, strict=True):
        qkv = linear(x, layer.qkv, layer.qkv_bias, norm=layer.attention_norm, eps=stack.eps)
        rope_and_cache(
            qkv, positions, stack.cos_sin, k, v, slots, *heads, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=stack.eps
        )
        mixed = paged_attention(qkv, k, v, block_tables, query_start, context, stack.scale, *heads, window=layer.window)
        if layer is stack.layers[-1]:
            x, mixed = x[rows], mixed[rows]
        linear(mixed, layer.o, layer.o_bias, add_to=x)
        linear(gate_up_silu(x, layer.gate_up, norm=layer.ffn_norm, eps=stack.eps), layer.down, add_to=x)
    return x


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Set logits[rows[i], t] to -inf wherever bit t of mask[i] (little-endian int32 words) is 0."""
    bits = (mask[:, :, None] >> torch.arange(32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Return one sampled id per row, which depends on that row only.

    Overwrites `logits`: call log_probs before.

    Temperature 0 selects the largest logit, the lowest id among equals. Otherwise tokens are ordered by (probability
    descending, id ascending). Top-k keeps a prefix of them, top-p the smallest prefix whose share of what top-k kept
    reaches p, and min-p those at least min_p times as probable as the first. `uniform` in [0, 1) then selects by
    inverse CDF.
    """
    rows = zip(logits, temperature, top_k, top_p, min_p, uniform, strict=True)
    return torch.stack([_sample_row(*row) for row in rows])


def uniform_from_seed(seed: Tensor, position: Tensor) -> Tensor:
    """Return numbers in [0, 1) that depend only on seed and position: the splitmix64 finaliser over both."""
    with np.errstate(over="ignore"):
        x = seed.numpy().view(np.uint64) + (position.numpy().astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def edit_logits(logits: Tensor, rows: Tensor, ids: Tensor, divide: Tensor, add: Tensor) -> None:
    """Divide positive logits[rows[i], ids[i]] by divide[i], multiply others by it, then add add[i]."""
    at = rows.long(), ids.long()
    values = logits[at]
    logits[at] = torch.where(values > 0, values / divide, values * divide) + add


def apply_penalties(logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
    """Apply repetition, frequency and presence penalties (`penalties` [P, 3]) to logits[rows[i]].

    They apply to the tokens that occurred according to counts[slots[i]]: the low 15 bits count a token's occurrences in
    the output, and the sign bit is set if the prompt contains it.
    """
    for row, slot, (repetition, frequency, presence) in zip(rows.tolist(), slots.tolist(), penalties, strict=True):
        values, seen = logits[row], counts[slot, : logits.shape[1]]
        count = (seen & MAX_TOKEN_COUNT).float()
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        changed = scaled - (count * frequency + (count > 0) * presence)
        logits[row] = torch.where(seen != 0, changed, values)


def count_tokens(counts: Tensor, slots: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Count tokens[rows[i]] once more in counts[slots[i]], up to MAX_TOKEN_COUNT. Slots must be distinct."""
    at = slots.long(), tokens[rows.long()]
    old = counts[at]
    counts[at] = torch.where((old & MAX_TOKEN_COUNT) == MAX_TOKEN_COUNT, old, old + 1)


def _sample_row(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    scaled, order = (logits.double() / temperature.double()).sort(descending=True, stable=True)
    p = scaled.softmax(-1)
    keep = int(top_k) if 0 < top_k < len(p) else len(p)
    if top_p < 1:
        mass = p[:keep].cumsum(0)
        keep = min(keep, 1 + int((mass < top_p.double() * mass[-1]).sum()))
    keep = min(keep, max(1, int((p >= min_p.double() * p[0]).sum())))
    mass = p[:keep].cumsum(0)
    return order[min(keep - 1, int((mass <= uniform * mass[-1]).sum()))]


def log_probs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of ids [S], top ids [S, n], their log-probabilities, and ranks of ids.

    Rank 1 is the most probable id.
    """
    chosen = logits.gather(1, ids[:, None])
    total = logits.double().logsumexp(-1, keepdim=True)
    _, order = logits.sort(descending=True, stable=True)
    top = order[:, :top_n]
    rank = (logits > chosen).sum(-1) + 1
    return (chosen - total).squeeze(1).float(), top, (logits.gather(1, top) - total).float(), rank


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions.long(), None].chunk(2, dim=-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _k_panels(k_cache: Tensor) -> Tensor:
    blocks, heads, block_size, head_dim = k_cache.shape
    inner = k_cache.stride(0), block_size * head_dim, block_size, 1
    return k_cache.as_strided((blocks, heads, head_dim, block_size), inner)


def _store(out: Tensor | None, y: Tensor) -> Tensor:
    return y if out is None else out.copy_(y)
