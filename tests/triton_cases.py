"""What the Triton kernels must do, on any device: random inputs, poisoned outputs, float64 beside them.

A kernel may be off by twice what torch is off in the same types, and a few roundings of float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rope_metadata import rope_metadata
from torch import Tensor

from emberline.kernels import work_limits, worklist
from emberline.kernels.arguments import AttentionInputs, AttentionLayer, AttentionMetadata, PositionShift
from emberline.kernels.cuda import uw12
from emberline.kernels.cuda.decode import DecodeScratch, DeviceWorkList
from emberline.kernels.reference import ReferenceBackend
from emberline.kernels.triton import cache_slots, packed_linear
from emberline.kernels.triton.activation import gelu_mul, silu_mul
from emberline.kernels.triton.attention import paged_attention
from emberline.kernels.triton.decode import split_decode_attention
from emberline.kernels.triton.linear import SkinnyTile
from emberline.kernels.triton.linear import linear as few_rows_linear
from emberline.kernels.triton.norm import layer_norm, rms_norm
from emberline.kernels.triton.rope import rope_and_cache
from emberline.kernels.triton.token_gather import gather_tokens
from emberline.kernels.triton.widen import widen_blocks
from emberline.kernels.uw12_ref import reference_pack

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def forbid_dependent_launches(monkeypatch: pytest.MonkeyPatch, functions: Iterable[tuple[Any, str]]) -> None:
    """Let functions of modules launch kernels one after the other, since the interpreter has no other launches."""
    for module, name in functions:
        launch = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, _launch=launch, **given: _launch(*args, **given | {"pdl": False})
        )


def assert_close(ours: Tensor, expected: Tensor, exact: Tensor) -> None:
    """Assert that the error is small in each element and in total."""
    assert ours.shape == exact.shape
    mine, theirs = ours.double() - exact, expected.double() - exact
    few = 32 * torch.finfo(F32).eps * exact.abs().max()
    assert mine.isfinite().all()
    assert mine.abs().max() <= 2 * theirs.abs().max() + few
    assert mine.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + few / 4


def assert_rounded_alike(ours: Tensor, expected: Tensor) -> None:
    """Assert equal rounding: an extra rounding to bfloat16 would change a third of the elements."""
    assert (ours == expected).float().mean() > 0.98


def random(*shape: int, device: str, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def poisoned(*shape: int, device: str, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, torch.nan, device=device).to(dtype)


def check_norm(device: str, dtype: torch.dtype, rows: int, columns: int, *, pdl: bool = False) -> None:
    wide = random(rows, columns + 8, device=device, dtype=dtype) * 3
    x, eps = wide[:, :columns], 1e-5
    weight = random(columns, device=device, dtype=dtype).float()
    out = poisoned(rows, columns, device=device, dtype=dtype)
    assert rms_norm(x, weight, eps, out, pdl=pdl) is out
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()
    assert_close(out, weight.to(dtype) * normed, exact)
    if dtype is BF16:
        assert_rounded_alike(out, weight.to(dtype) * normed)
    assert torch.equal(rms_norm(x, weight, eps), out)
    in_place = rms_norm(wide[:, :columns], weight, eps, wide[:, :columns])
    assert (in_place == out).float().mean() > 0.999  # rows with another stride are summed in another order


def check_silu(
    device: str, dtype: torch.dtype, rows: int, columns: int, group: int | None = None, *, pdl: bool = False
) -> None:
    group = group or columns
    gate_up = random(rows, 2 * columns, device=device, dtype=dtype) * 4
    out = poisoned(rows, columns, device=device, dtype=dtype)
    assert silu_mul(gate_up, out, group, pdl=pdl) is out
    gate, up = gate_up.view(rows, -1, 2, group).unbind(2)
    gate, up = gate.reshape(rows, columns), up.reshape(rows, columns)
    assert_close(out, F.silu(gate) * up, F.silu(gate.double()) * up.double())
    if dtype is BF16:
        assert_rounded_alike(out, F.silu(gate) * up)
    gelu_mul(gate_up, out, group, pdl=pdl)
    theirs = F.gelu(gate, approximate="tanh") * up
    assert_close(out, theirs, F.gelu(gate.double(), approximate="tanh") * up.double())


def check_layer_norm(device: str, dtype: torch.dtype, rows: int, groups: int, width: int, *, pdl: bool = False) -> None:
    wide = random(rows, groups * width + 8, device=device, dtype=dtype) * 3 + 1
    x, weight = wide[:, 4 : 4 + groups * width], random(groups, width, device=device)
    weight = weight[0] if groups == 1 else weight
    out = poisoned(rows, groups * width, device=device, dtype=dtype)
    assert layer_norm(x, weight, 1e-5, out, pdl=pdl) is out
    reference = ReferenceBackend("test")
    near, exact = (reference.layer_norm(x.to(t), weight.to(t), 1e-5, x.to(t, copy=True)) for t in (F32, torch.float64))
    assert_close(out, near.to(dtype), exact)
    before = wide.clone()
    layer_norm(x, weight, 1e-5, x, pdl=pdl)
    assert torch.equal(x, out) and torch.equal(wide[:, :4], before[:, :4])


def norm_and_rotate(
    x: Tensor, positions: Tensor, cos_sin: Tensor, norm: Tensor | None, eps: float, *, interleaved: bool = False
) -> Tensor:
    """Return x [T, heads, dim] after norm and rotation, in its own dtype."""
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.to(x.dtype)
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.to(x.dtype)[positions.long(), None].chunk(2, dim=-1)
    if interleaved:
        a, b, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2), rest], dim=-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def check_rope(
    device: str,
    dtype: torch.dtype,
    cache: torch.dtype,
    tokens: int,
    heads: tuple[int, int, int],
    rotary: int,
    *,
    normed: bool = False,
    interleaved: bool = False,
    block: int = 16,
    pdl: bool = False,
) -> None:
    q_heads, kv_heads, dim = heads
    count, eps = q_heads + 2 * kv_heads, 1e-6
    qkv = random(tokens, count * dim, device=device, dtype=dtype)
    qkv[:, ::7] *= 200  # partly beyond the range of float8
    table, positions = random(97, rotary, device=device), torch.randint(97, (tokens,), device=device).int()
    blocks = -(-tokens // block) + 2
    slots = torch.randperm(blocks * block, device=device)[:tokens]
    slots[1 :: max(5, tokens // 3)] = -1
    q_norm, k_norm = (random(dim, device=device) for _ in range(2)) if normed else (None, None)
    both = poisoned(blocks, 2, kv_heads, block, dim, device=device, dtype=cache)  # strided, as one layer of many may be
    keys, values = both[:, 0], both[:, 1]
    before = qkv.clone()
    norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    layer = AttentionLayer(*heads, scale=1.0, cos_sin=table, interleaved=interleaved, **norms)
    rope_and_cache(qkv, layer, keys, values, rope_metadata(positions, slots), pdl=pdl)
    q, k, v = before.view(tokens, count, dim).split([q_heads, kv_heads, kv_heads], dim=1)
    got_q, got_k, got_v = qkv.view(tokens, count, dim).split([q_heads, kv_heads, kv_heads], dim=1)
    assert torch.equal(got_k, k) and torch.equal(got_v, v)
    rotate = partial(norm_and_rotate, positions=positions, cos_sin=table, eps=eps, interleaved=interleaved)
    exact_q = rotate(q.double(), norm=q_norm)
    assert_close(got_q, rotate(q.float(), norm=q_norm).to(dtype), exact_q)
    kept = slots >= 0
    at = slots[kept] // block, slots[kept] % block
    exact_k, near_k = (rotate(k.to(t), norm=k_norm)[kept] for t in (torch.float64, F32))
    for got, near, exact in (
        (keys.float()[at[0], :, at[1]], near_k, exact_k),
        (values.float()[at[0], :, at[1]], v[kept].float(), v[kept].double()),
    ):
        most = 448.0 if cache == FP8 else torch.inf
        assert_close(got, near.clamp(-most, most).to(cache).float(), exact.clamp(-most, most))
    for whole in (keys.float(), values.float()):
        whole[at[0], :, at[1]] = torch.nan
        assert whole.isnan().all()  # nothing else was written


def check_nan_and_inf(device: str, dtype: torch.dtype, cache: torch.dtype) -> None:
    """Assert that NaN and inf stay in queries and never reach the cache, where another request would read them."""
    heads, tokens, block = (4, 2, 16), 8, 16
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max], device=device, dtype=dtype)
    qkv = random(tokens, 8 * 16, device=device, dtype=dtype)
    clean = qkv.clone()
    qkv.view(-1)[: 4 * 100 : 100] = odd
    qkv.view(tokens, 8, 16)[2, 4:, 3:7] = odd  # of keys and values
    table, positions = random(97, 16, device=device), torch.arange(tokens, device=device).int()
    caches = []
    for given in (qkv, clean):
        keys, values = (torch.zeros(1, 2, block, 16, device=device).to(cache) for _ in range(2))
        layer = AttentionLayer(*heads, scale=1.0, cos_sin=table)
        rope_and_cache(given, layer, keys, values, rope_metadata(positions, positions.long()))
        assert keys.float().isfinite().all() and values.float().isfinite().all()
        caches.append((keys.float()[:, :, 7], values.float()[:, :, 7]))
    assert all(map(torch.equal, *caches)), "finite values stay unchanged"
    assert not qkv.isfinite().all()


@dataclass(frozen=True)
class AttentionCase:
    """Random queries and a poisoned cache, in which only the keys and values of the requests are numbers."""

    inputs: AttentionInputs
    lengths: list[tuple[int, int]]  # tokens before, and new tokens, of each request
    dense: list[Tensor]  # keys and values of each request, [2, kv_heads, keys, dim]

    @staticmethod
    def random(
        device: str,
        dtype: torch.dtype,
        cache: torch.dtype,
        lengths: list[tuple[int, int]],
        heads: tuple[int, int, int],
        *,
        block: int = 64,
        has_sinks: bool = False,
        garbage: float = torch.nan,
        **kind: Any,
    ) -> AttentionCase:
        """`kind`: window, softcap and chunked of the layer. Blocks that no query of a request may read are absent.

        `garbage`: what the rest of the cache contains; finite for the CUDA kernels, which read whole blocks."""
        q_heads, kv_heads, dim = heads
        none = torch.empty(0, device=device)  # attention reads neither positions, nor slots, nor angles
        sinks = random(q_heads, device=device) * 3 if has_sinks else None
        layer = AttentionLayer(*heads, scale=dim**-0.5, cos_sin=none, sinks=sinks, **kind)
        needed = [-(-(before + new) // block) for before, new in lengths]
        free = torch.randperm(sum(needed) + 3).int().split([*needed, 3])
        tables = torch.full((len(lengths), max(needed) + 2), 1 << 30, dtype=torch.int32)
        both = torch.full((sum(needed) + 3, 2, kv_heads, block, dim), garbage, device=device).to(cache)
        dense = []
        stored = torch.uint8 if cache == FP8 else cache
        for row, blocks, (before, new) in zip(tables, free, lengths, strict=False):
            first = before // layer.window * layer.window if layer.chunked else max(0, before + 1 - layer.window)
            first_block = first // block if layer.window and new else 0
            row[first_block : len(blocks)] = blocks[first_block:]
            kv = random(2, kv_heads, before + new, dim, device=device).to(cache)
            dense.append(kv)
            at = torch.arange(before + new)
            both.view(stored)[blocks.long()[at // block], :, :, at % block] = kv.view(stored).permute(2, 0, 1, 3)
        total = sum(new for _, new in lengths)
        qkv = random(total, (q_heads + 2 * kv_heads) * dim, device=device, dtype=dtype) * 2
        starts = torch.tensor([0, *np.cumsum([new for _, new in lengths])], dtype=torch.int32)
        context = torch.tensor([before for before, _ in lengths], dtype=torch.int32)
        metadata = AttentionMetadata(none, none, starts.to(device), context.to(device), tables.to(device))
        return AttentionCase(AttentionInputs(qkv, layer, both[:, 0], both[:, 1], metadata), lengths, dense)

    def poisoned_out(self) -> Tensor:
        qkv, layer = self.inputs.qkv, self.inputs.layer
        return poisoned(len(qkv), layer.q_heads * layer.head_dim, device=str(qkv.device), dtype=qkv.dtype)

    def check(self, out: Tensor) -> None:
        """Compare the output of each request with dense attention in the same types and in float64."""
        qkv, layer = self.inputs.qkv, self.inputs.layer
        q = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.q_heads]
        begin = 0
        for (before, new), kv in zip(self.lengths, self.dense, strict=True):
            rows = slice(begin, begin + new)
            begin += new
            if not new:
                continue
            one = q[rows].transpose(0, 1)
            theirs, exact = (dense_attention(one, kv, before, layer, t) for t in (qkv.dtype, torch.float64))
            assert_close(out[rows].view(new, layer.q_heads, layer.head_dim), theirs, exact)


def make_tiles(counts: list[int], tile_queries: int) -> Tensor:
    """Return prefill tiles of at most so many queries, and one that is padding."""
    tiles = [[row, first] for row, count in enumerate(counts) for first in range(0, count, tile_queries)]
    return torch.tensor([*tiles, [-1, 0]], dtype=torch.int32)


def check_attention(
    device: str,
    dtype: torch.dtype,
    cache: torch.dtype,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    *,
    tile_queries: int = 128,
    pdl: bool = False,
    **kind: Any,
) -> None:
    """Check attention. `lengths`: tokens before, and new tokens, of each request; `kind`: see AttentionCase."""
    case = AttentionCase.random(device, dtype, cache, lengths, heads, **kind)
    tiles, out = make_tiles([new for _, new in lengths], tile_queries).to(device), case.poisoned_out()
    paged_attention(case.inputs, tiles, out=out, tile_queries=tile_queries, pdl=pdl)
    case.check(out)


def plan_rows(lengths: list[tuple[int, int]], kv_heads: int, num_sms: int, device: str) -> DeviceWorkList:
    """Return the work list of decode rows with so many keys before, and new tokens."""
    planned = [before + new if new else 0 for before, new in lengths]
    capacity = work_limits.max_work_items(len(lengths), kv_heads, num_sms)
    work = worklist.plan_decode_work(planned, kv_heads, num_sms, capacity)
    return DeviceWorkList(torch.from_numpy(work.data).to(device), len(lengths), capacity)


def check_decode(
    device: str,
    dtype: torch.dtype,
    cache: torch.dtype,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    *,
    num_sms: int = 132,
    window_parts: int = 0,
    pdl: bool = False,
    launches_again: bool = True,
    **kind: Any,
) -> None:
    """Check decode with split keys, for `num_sms` SMs; with `launches_again`, that a second launch gives its bits."""
    case = AttentionCase.random(device, dtype, cache, lengths, heads, **kind)
    most = max(new for _, new in lengths)
    work, out = plan_rows(lengths, heads[1], num_sms, device), case.poisoned_out()
    scratch = DecodeScratch(len(lengths), work.capacity, *heads, torch.device(device), max_queries=most)
    shape: dict[str, Any] = {"max_queries": most, "pdl": pdl, "window_parts": window_parts}
    assert split_decode_attention(case.inputs, work, scratch, num_sms, out=out, **shape) is out
    case.check(out)
    assert not scratch.counters.any(), "the counters must be zero between launches"
    if launches_again:
        again = split_decode_attention(case.inputs, work, scratch, num_sms, out=case.poisoned_out(), **shape)
        assert torch.equal(again, out)


def dense_attention(q: Tensor, kv: Tensor, before: int, layer: AttentionLayer, dtype: torch.dtype) -> Tensor:
    heads, new, _ = q.shape
    k, v = kv.to(F32).to(dtype).repeat_interleave(heads // kv.shape[1], dim=1)
    key = torch.arange(before + new, device=q.device)
    position = key[before:, None]
    size = layer.window or before + new
    seen = (key <= position) & (key // size == position // size if layer.chunked else key > position - size)
    if layer.softcap or layer.sinks is not None:
        wide = torch.promote_types(dtype, F32)
        scores = q.to(dtype).to(wide) @ k.to(wide).transpose(1, 2) * layer.scale
        scores = layer.softcap * (scores / layer.softcap).tanh() if layer.softcap else scores
        sinks = torch.full((heads,), -torch.inf, device=q.device) if layer.sinks is None else layer.sinks
        columns = sinks.to(wide)[:, None, None].expand(heads, new, 1)
        weights = torch.cat([scores.masked_fill(~seen, -torch.inf), columns], dim=-1).softmax(-1)[..., :-1]
        return (weights.to(dtype).to(wide) @ v.to(wide)).to(dtype).transpose(0, 1)
    mixed = F.scaled_dot_product_attention(q.to(dtype)[None], k[None], v[None], seen, scale=layer.scale)
    return mixed[0].transpose(0, 1)


def check_rows(device: str, count: int, *, pdl: bool = False) -> None:
    last = torch.randint(1 << 40, (count + 5,), device=device)
    rows = torch.randperm(count + 5, device=device)[:count]
    tokens = torch.randint(1 << 40, (count,), device=device)
    tokens[::2] = -1
    out = torch.full((count,), -7, device=device)
    gather_tokens(tokens, rows, last, out, pdl=pdl)
    assert torch.equal(out, torch.where(tokens < 0, last[rows], tokens))


def check_cache_slots(device: str, count: int) -> None:
    """Check positions and slots against the CPU's definition, with padding rows and limits."""
    reference, generator = ReferenceBackend("test"), torch.Generator().manual_seed(count)
    tables = torch.randperm(8 * (count + 1), generator=generator).int().view(count + 1, 8)
    limits = torch.randint(0, 128, (count,), generator=generator)
    position = torch.randint(0, 128, (count,), generator=generator)
    found = cache_slots.find_slots(*(x.to(device) for x in (position, limits, tables[:count].contiguous())), 16)
    for ours, wanted in zip(found, reference.find_slots(position, limits, tables[:count], 16), strict=True):
        assert torch.equal(ours.cpu(), wanted)
    owners = torch.where(limits > 40, torch.arange(count), count)  # the last row is padding
    accepted = torch.cat([torch.randint(0, 5, (count,), generator=generator), torch.zeros(1, dtype=torch.int64)])
    moved = [position.int().clamp(max=120), position.clone(), position.int()[: count // 2 + 1]]
    tensors = [*moved, owners, owners[: count // 2 + 1], accepted, tables]
    on_device = PositionShift(*(x.to(device, copy=True) for x in tensors), count, 16)
    cache_slots.shift_positions(on_device)
    expected = PositionShift(*(x.clone() for x in tensors), count, 16)
    reference.shift_positions(expected)
    for ours, wanted in zip(on_device[:3], expected[:3], strict=True):
        assert torch.equal(ours.cpu(), wanted)
    # Two more block tables beside the first of each row, for further groups of layers.
    windows, beside = torch.full((2, count + count % 2), -5), torch.cat([tables, tables.flip(0), tables + 1], 1)
    tensors = [*moved, *tensors[3:6], beside]
    grouped = PositionShift(*(x.to(device, copy=True) for x in tensors), count, 16, windows.to(device, copy=True), 8)
    cache_slots.shift_positions(grouped)
    reference.shift_positions(again := PositionShift(*(x.clone() for x in tensors), count, 16, windows, 8))
    for ours, wanted in zip((*grouped[:3], grouped.window_slots), (*expected[:3], again.window_slots), strict=True):
        assert torch.equal(ours.cpu(), wanted)
    shifted = owners != count
    assert torch.equal(windows[1, :count], torch.where(shifted, expected.slots + 16, -5))


def check_widen(device: str, rows: int, heads: int, size: int, dim: int, *, pdl: bool = False) -> None:
    """Check that the requested blocks are widened and all others stay unchanged."""
    k, v = (torch.randn(4 * rows, heads, size, dim, device=device).to(FP8) for _ in range(2))
    tables = torch.randperm(4 * rows, device=device).int().view(rows, 4)
    pieces = torch.tensor([[row, at] for row in range(rows) for at in range(row % 4)] + [[0, 0]] * 3).int().to(device)
    count = torch.tensor([len(pieces) - 3], dtype=torch.int32, device=device)
    keys, values = (torch.full((len(pieces), heads, size, dim), 7.0, dtype=BF16, device=device) for _ in range(2))
    widen_blocks(k, v, keys, values, tables, pieces, count, pdl=pdl)
    blocks = tables[pieces[:-3, 0].long(), pieces[:-3, 1].long()].long()
    for cache, got in ((k, keys), (v, values)):
        assert torch.equal(got[:-3], cache.view(torch.uint8)[blocks].view(FP8).to(BF16))
        assert bool((got[-3:] == 7.0).all())


def check_few_rows(
    device: str, m: int, n: int, k: int, *, split: int, kind: str = "", group: int = 0, pdl: bool = False
) -> None:
    """Check a product with few rows. `kind`: "bias", "residual", "float32" or nothing; `group`: of gate rows.

    `split`: parts of k; 0: the default tile."""
    wide = random(m, k + 8, device=device, dtype=BF16)
    x, w = wide[:, :k], random(n, k, device=device, dtype=BF16)
    bias = random(n, device=device) if kind == "bias" else None
    out = poisoned(m, n // 2 if group else n, device=device, dtype=F32 if kind == "float32" else BF16)
    residual = None
    if kind == "residual":
        out = residual = random(m, n, device=device, dtype=BF16)
    before = None if residual is None else residual.clone()
    for _ in range(2):  # the second launch finds the counters as the first left them
        if before is not None:
            out.copy_(before)
        tile = SkinnyTile(64, 32, split, 4, 2) if split else None
        assert few_rows_linear(x, w, out=out, bias=bias, residual=residual, group=group, tile=tile, pdl=pdl) is out
    exact = x.double() @ w.double().t()
    expected = (x.float() @ w.float().t()).to(out.dtype)
    if bias is not None:
        exact, expected = exact + bias.double(), (expected.float() + bias).to(BF16)
    if before is not None:
        exact, expected = exact + before.double(), expected + before
    if group:
        (gate, up), (gate_, up_) = (y.view(m, -1, 2, group).unbind(2) for y in (exact, expected))
        exact, expected = (F.silu(gate) * up).reshape(m, -1), (F.silu(gate_) * up_).reshape(m, -1)
    assert_close(out, expected, exact)


def check_packed_rows(
    device: str,
    m: int,
    n: int,
    k: int,
    *,
    split: int,
    kind: str = "",
    group: int = 0,
    depth: int = 64,
    pdl: bool = False,
) -> None:
    """Check a product of few rows with a uw12 weight, some of whose weights are escapes; as `check_few_rows`."""
    wide = random(m, k + 8, device=device, dtype=BF16)
    x, w = wide[:, :k], random(n, k, device=device, dtype=BF16)
    w[torch.rand(w.shape, device=device) < 0.003] *= 2.0**-30  # small weights become escapes
    w[3, 5:25] *= 2.0**-40
    w[n - 1, k - 1], w[n // 2, 0] = 4096.0, -0.0
    packed = uw12.pack(w) if device == "cuda" else reference_pack(w)
    assert packed is not None
    bias = random(n, device=device) if kind == "bias" else None
    out = poisoned(m, n // 2 if group else n, device=device, dtype=F32 if kind == "float32" else BF16)
    before = random(m, n, device=device, dtype=BF16) if kind == "residual" else None
    out = out if before is None else before.clone()
    tile = SkinnyTile(64, depth, split, 4, 2) if split else None
    for _ in range(2):  # the second launch finds the counters as the first left them
        if before is not None:
            out.copy_(before)
        residual = None if before is None else out
        packed_linear.linear(x, packed, out=out, bias=bias, residual=residual, group=group, tile=tile, pdl=pdl)
    exact, expected = x.double() @ w.double().t(), (x.float() @ w.float().t()).to(out.dtype)
    if bias is not None:
        exact, expected = exact + bias.double(), (expected.float() + bias).to(BF16)
    if before is not None:
        exact, expected = exact + before.double(), expected + before
    if group:
        (gate, up), (gate_, up_) = (y.view(m, -1, 2, group).unbind(2) for y in (exact, expected))
        exact, expected = (F.silu(gate) * up).reshape(m, -1), (F.silu(gate_) * up_).reshape(m, -1)
    assert_close(out, expected, exact)
