"""rope_and_cache: `OpBackend.rope_and_cache` for a cache that stores keys row by row, like values.

A Triton program is one warp and processes a few heads of one token. It loads all of its heads before it stores any of
them, so that q can be rotated in place.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.arguments import AttentionLayer, AttentionMetadata
from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

HEADS_PER_PROGRAM = 8  # with 16, 8,192 tokens of Qwen3-30B-A3B took 2 ms more; with 4, they took 4 ms more


@jit
def _rope_and_cache(
    qkv: tensor, positions: tensor, cos_sin: tensor, k_cache: tensor, v_cache: tensor, slots: tensor,
    q_norm: tensor, k_norm: tensor, qkv_stride: tensor, cache_stride: tensor, eps: tensor,
    Q_HEADS: constexpr, KV_HEADS: constexpr, HEAD_DIM: constexpr, HALF: constexpr,
    HALF_PADDED: constexpr, REST_PADDED: constexpr, BLOCK_SIZE: constexpr, TILE: constexpr,
    NORM: constexpr, INTERLEAVED: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    is_q, is_v, is_head = head < Q_HEADS, head >= Q_HEADS + KV_HEADS, head < Q_HEADS + 2 * KV_HEADS
    at = qkv + token.to(tl.int64) * qkv_stride + head * HEAD_DIM
    cached = slot // BLOCK_SIZE * cache_stride + (slot % BLOCK_SIZE + (head - Q_HEADS) * BLOCK_SIZE) * HEAD_DIM
    k_at, v_at = k_cache + cached, v_cache + cached - KV_HEADS * BLOCK_SIZE * HEAD_DIM
    to_k, to_v = (slot >= 0) & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS), (slot >= 0) & is_v & is_head

    d = tl.arange(0, HALF_PADDED)[None, :]
    is_rotated = d < HALF
    if INTERLEAVED:
        first, second = 2 * d, 2 * d + 1
    else:
        first, second = d, HALF + d
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF) + d
    cos, sin = tl.load(angle, is_rotated, 0.0), tl.load(angle + HALF, is_rotated, 0.0)
    a = tl.load(at + first, is_head & is_rotated, 0.0).to(tl.float32)
    b = tl.load(at + second, is_head & is_rotated, 0.0).to(tl.float32)
    e = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
    is_rest = e < HEAD_DIM
    rest = tl.load(at + e, is_head & is_rest, 0.0).to(tl.float32)
    if NORM:
        size = tl.sum(a * a + b * b, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(size / HEAD_DIM + eps)[:, None]
        a = tl.where(is_v, a, a * scale * _load_norm(q_norm, k_norm, first, is_rotated, is_q))
        b = tl.where(is_v, b, b * scale * _load_norm(q_norm, k_norm, second, is_rotated, is_q))
        rest = tl.where(is_v, rest, rest * scale * _load_norm(q_norm, k_norm, e, is_rest, is_q))
    to_q, to_k_pair, to_v_pair = is_q & is_rotated, to_k & is_rotated, to_v & is_rotated
    _store_heads(a * cos - b * sin, a, at + first, k_at + first, v_at + first, to_q, to_k_pair, to_v_pair)
    _store_heads(b * cos + a * sin, b, at + second, k_at + second, v_at + second, to_q, to_k_pair, to_v_pair)
    _store_heads(rest, rest, at + e, k_at + e, v_at + e, is_q & is_rest, to_k & is_rest, to_v & is_rest)


@jit
def _load_norm(q_norm: tensor, k_norm: tensor, d: tensor, inside: tensor, is_q: tensor) -> tensor:
    return tl.where(is_q, tl.load(q_norm + d, inside, 0.0), tl.load(k_norm + d, inside, 0.0))


@jit
def _store_heads(
    rotated: tensor,
    unrotated: tensor,
    q_at: tensor,
    k_at: tensor,
    v_at: tensor,
    is_q: tensor,
    is_k: tensor,
    is_v: tensor,
) -> None:
    """Store rotated q heads in `qkv`, rotated k heads in the key cache, and v heads in the value cache."""
    tl.store(q_at, rotated.to(q_at.dtype.element_ty), is_q)
    tl.store(k_at, _round_to_cache_dtype(rotated, k_at.dtype.element_ty), is_k)
    tl.store(v_at, _round_to_cache_dtype(unrotated, v_at.dtype.element_ty), is_v)


@jit
def _round_to_cache_dtype(x: tensor, TYPE: constexpr) -> tensor:
    """Round to the dtype of the cache. float8 saturates, and values that are not finite become zero.

    After a KV block is reused, attention multiplies its stale values by zero, and zero times infinity would be NaN.
    """
    if tl.float8e4nv == TYPE:
        x = tl.clamp(tl.where(x == x, x, 0.0), -448.0, 448.0)
    stored = x.to(TYPE).to(tl.float32)
    return tl.where(tl.abs(stored) < float("inf"), stored, 0.0).to(TYPE)


def rope_and_cache(
    qkv: Tensor,
    layer: AttentionLayer,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    pdl: bool = False,
) -> None:
    """Rotate q inside `qkv`, and write the rotated k and v into the layer's cache `keys` and `values`.

    The k inside `qkv` stays unrotated.
    """
    cos_sin, q_norm, k_norm, head_dim = layer.cos_sin, layer.q_norm, layer.k_norm, layer.head_dim
    heads, half = layer.q_heads + 2 * layer.kv_heads, cos_sin.shape[1] // 2
    has_norm = q_norm is not None
    assert has_norm == (k_norm is not None) and keys.stride() == values.stride() and cos_sin.is_contiguous()
    if not len(qkv):
        return
    _rope_and_cache[(len(qkv), -(-heads // HEADS_PER_PROGRAM))](
        qkv, metadata.positions, cos_sin, keys, values, metadata.slots,
        q_norm if has_norm else cos_sin, k_norm if has_norm else cos_sin, qkv.stride(0), keys.stride(0), layer.eps,
        layer.q_heads, layer.kv_heads, head_dim, half, next_power_of_two(half), next_power_of_two(head_dim - 2 * half),
        keys.shape[2], HEADS_PER_PROGRAM, has_norm, layer.interleaved, pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
