"""The ops on a GPU: which kernel serves which shape. Signatures and meaning are those of `ops`.

While reading the weights is most of the time, our own products run, with what follows them built in: `skinny` up to 32
rows, `wide` where it is faster, up to 256; beyond, cuBLAS. Both read weights in 12 bits as they are, and give the same
bits for them; cuBLAS gets them unpacked, a matrix ahead where the caller has an `Ahead`. Of weights kept both ways each
product reads those with which it is faster. Every kernel of ours may start before the one before it in the stream has
ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.ahead import Ahead
from emberline.kernels.cuda import cublas, decode, gemm, prefill, uw12, wide
from emberline.kernels.cuda import linear as skinny
from emberline.kernels.cuda import sample as sampling
from emberline.kernels.cuda.cublas import OURS, Kind, Problem
from emberline.kernels.packed import Layout, PackedWeight
from emberline.kernels.tiles import GATED_ROWS, Tiles
from emberline.kernels.triton import activation, attention, norm, rope, rows, widen

__all__ = [
    "apply_bitmask", "count_tokens", "draw", "edit", "embed", "gate_up_silu", "keep_packed", "linear", "log_probs",
    "newest_tokens", "pack_linear", "paged_attention", "penalise", "rope_and_cache", "settle",
]  # fmt: skip

apply_bitmask = sampling.apply_bitmask
count_tokens = sampling.count_tokens
edit = sampling.edit
log_probs = sampling.log_probs
penalise = sampling.penalise

UNPACKED = 8192 * 4096  # weights of a head that are unpacked at a time, at most
# Weights kept both ways are read in 12 bits up to so many rows, in matrices of more weights than these.
MOST_PACKED = ((4096 * 16384, 128), (4096 * 4096, 64), (0, 32))
MANY_ROWS = 1024  # from which on our own large product mostly beats cuBLAS and one more kernel for silu(gate) * up


def pack_linear(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    n, k = weight.shape
    ours = weight.dtype is torch.bfloat16 and skinny.supports(1, n, k)
    handle = skinny.Weight(weight) if ours else None
    return PackedWeight(weight, n, k, weight.dtype, Layout.ROWS, gated, weight.data_ptr(), handle)


def settle(empty: PackedWeight, values: Tensor) -> int:
    """Its values have come: they are kept in 12 bits where that gains. The bytes that takes."""
    if values.dtype is torch.bfloat16 and (packed := uw12.pack(values)):
        empty.data, empty.handle, empty.layout = packed.planes, packed, Layout.UW12
        return packed.nbytes
    whole = pack_linear(values, gated=empty.gated)
    empty.data, empty.handle, empty.layout = whole.data, whole.handle, whole.layout
    return values.nbytes


def keep_packed(weight: PackedWeight) -> int:
    if weight.packed is not None or weight.dtype is not torch.bfloat16 or weight.handle is None:
        return 0  # a tied head is met twice
    if (packed := uw12.pack(weight.data)) is None:
        return 0
    weight.packed = packed
    return packed.nbytes


def linear(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
    full: bool = False,
    ahead: Ahead | None = None,
) -> Tensor:
    x = _normed(x, norm, eps)
    m = len(x)
    if product := _product(x, w):
        kind = torch.float32 if full else x.dtype
        y = add_to if add_to is not None else x.new_empty(m, w.n, dtype=kind) if out is None else out
        return product(out=y, bias=bias, residual=add_to)
    if full:
        return _full(x, w, bias, out)
    with _rows(x, w, ahead) as rows_:
        if add_to is not None:
            _add_product(x, rows_, add_to)
            return add_to if bias is None else add_to.add_(bias)
        y = _matmul(x, rows_) if bias is None else F.linear(x, rows_, bias.to(x.dtype))
    return y if out is None else out.copy_(y)


def gate_up_silu(
    x: Tensor,
    w: PackedWeight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    ahead: Ahead | None = None,
) -> Tensor:
    x = _normed(x, norm, eps)
    width = w.n // 2
    y = x.new_empty(len(x), width) if out is None else out
    if width % GATED_ROWS == 0 and (product := _product(x, w)):
        return product(out=y, gated=True)
    group = GATED_ROWS if width % GATED_ROWS == 0 else width
    with _rows(x, w, ahead) as rows_:
        if w.handle is not None and group == GATED_ROWS and _gated_by_ours(len(x), w):
            plain = w.handle if isinstance(w.handle, skinny.Weight) else skinny.Weight(rows_)
            early = plain is w.handle  # weights just unpacked may not be read early
            return gemm.linear(x, plain, out=y, gated=True, pdl=early)
        both = _matmul(x, rows_, Kind.GATED)
    return activation.silu_mul(both, y, group, pdl=True)


def embed(ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    if isinstance(table, PackedWeight) and isinstance(table.handle, uw12.Packed):
        out = torch.empty(len(ids), table.k, dtype=table.dtype, device=ids.device)
        return uw12.gather(ids, table.handle, out)
    return torch.index_select(table.data if isinstance(table, PackedWeight) else table, 0, ids)


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
    rope.rope_and_cache(
        qkv, positions, cos_sin, k_cache, v_cache, slots, q_heads, kv_heads, head_dim,
        q_norm=q_norm, k_norm=k_norm, eps=eps, pdl=True,
    )  # fmt: skip


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
    tiles: Tiles,
) -> Tensor:
    heads = q_heads, kv_heads, head_dim
    out = qkv.new_empty(len(qkv), q_heads * head_dim)
    at, beside = k_cache.data_ptr(), False
    if tiles.chunks is not None and len(tiles.chunks):  # first: singles fill what it leaves of the device
        beside = tiles.chunk_sms is not None
        keys, values, tables = k_cache, v_cache, block_tables
        if (wide_ := tiles.widened) is not None and wide_.tables is not None:
            keys, values, tables = wide_.keys, wide_.values, wide_.tables
            widen.widen(k_cache, v_cache, keys, values, block_tables, wide_.pieces, wide_.count, pdl=True)
        if keys.data_ptr() not in tiles.maps.prefill:
            tiles.maps.prefill[keys.data_ptr()] = prefill.PagedCache(keys, values)
        prefill.prefill_attention(
            qkv, tiles.maps.prefill[keys.data_ptr()], tables, query_start, context, tiles.chunks, scale, q_heads,
            window=window, out=out, sms=tiles.chunk_sms, counters=tiles.counters,
        )  # fmt: skip
    if tiles.work is not None:
        assert tiles.scratch is not None
        one = tiles.singles
        if at not in tiles.maps.decode:
            tiles.maps.decode[at] = decode.LayerCache(k_cache, v_cache)
        decode.decode_attention(
            qkv[:one], tiles.maps.decode[at], block_tables[:one], context[:one], tiles.work, scale, *heads,
            window=window, out=out[:one], scratch=tiles.scratch, beside=beside,
        )  # fmt: skip
    if tiles.general is not None:
        attention.paged_attention(
            qkv, k_cache, v_cache, block_tables, query_start, context, tiles.general, scale, *heads,
            window=window, out=out, block_m=tiles.queries, pdl=True,
        )  # fmt: skip
    return out


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return sampling.sample(logits, temperature, top_k, top_p, min_p, seed, position, ids)


def newest_tokens(tokens: Tensor, owners: Tensor, newest: Tensor) -> Tensor:
    return rows.gather_tokens(tokens, owners, newest, torch.empty_like(tokens), pdl=True)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else norm.rms_norm(x, weight, eps, pdl=True)


def _product(x: Tensor, w: PackedWeight) -> Callable[..., Tensor] | None:
    """Our own, where there is one and it is faster than cuBLAS."""
    m = len(x)
    if w.handle is None or x.dtype is not torch.bfloat16:
        return None
    handle: Any = w.packed if w.packed is not None and m <= _most_packed(w) else w.handle
    if wide.supports(m, w.n, w.k, packed=isinstance(handle, uw12.Packed)):
        return partial(wide.linear, x, handle)
    return partial(skinny.linear, x, handle) if skinny.supports(m, w.n, w.k) else None


def _gated_by_ours(m: int, w: PackedWeight) -> bool:
    """By our large product, with silu(gate) * up built in. Where nothing was measured, from MANY_ROWS on."""
    choice = cublas.choices.get(Problem(m, w.n, w.k, Kind.GATED))
    return gemm.supports(m, w.n, w.k) and (m >= MANY_ROWS if choice is None else choice == OURS)


def _matmul(x: Tensor, rows_: Tensor, kind: Kind = Kind.STORE) -> Tensor:
    if not cublas.chosen(x, rows_, kind):
        return F.linear(x, rows_)
    return cublas.product(x, rows_, out=x.new_empty(len(x), len(rows_)), kind=kind)


def _add_product(x: Tensor, rows_: Tensor, to: Tensor) -> None:
    if cublas.chosen(x, rows_, Kind.ADD, to):
        cublas.product(x, rows_, out=to, kind=Kind.ADD)
    else:
        to.addmm_(x, rows_.t())


def _most_packed(w: PackedWeight) -> int:
    """Rows of x: with more, plain weights are faster."""
    return next(rows for weights, rows in MOST_PACKED if w.n * w.k > weights)


def _full(x: Tensor, w: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Products of bf16 with their sums as they are, in float32."""
    y = x.new_empty(len(x), w.n, dtype=torch.float32) if out is None else out
    if isinstance(w.handle, uw12.Packed):
        step = max(64, UNPACKED // w.k // 64 * 64)
        for at in range(0, w.n, step):
            part = w.handle.rows(at, min(at + step, w.n))
            torch.mm(x, _unpacked(part).t(), out_dtype=torch.float32, out=y[:, at : at + part.n])
    elif x.dtype is torch.float32:
        torch.mm(x, w.data.t(), out=y)
    else:
        torch.mm(x, w.data.t(), out_dtype=torch.float32, out=y)
    return y if bias is None else y.add_(bias)


def _rows(x: Tensor, w: PackedWeight, ahead: Ahead | None) -> AbstractContextManager[Tensor]:
    """As they were, for the product that is launched inside and no other."""
    if not isinstance(w.handle, uw12.Packed):
        return nullcontext(w.data)
    if ahead is None:
        return nullcontext(_unpacked(w.handle))
    then = ahead.following(w)
    wanted = then is not None and then.layout is Layout.UW12 and _product(x, then) is None
    return ahead.rows(w, then if wanted else None)


def _unpacked(packed: uw12.Packed) -> Tensor:
    out = torch.empty(packed.n, packed.k, dtype=torch.bfloat16, device=packed.planes.device)
    return uw12.unpack(packed, out)
