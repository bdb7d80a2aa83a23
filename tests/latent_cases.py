"""What the kernels of latent attention must do, on any device: random inputs, poisoned outputs, float64 beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from emberline.kernels import work_limits, worklist
from emberline.kernels.arguments import AttentionLayer, AttentionMetadata, LatentInputs, LatentLayer
from emberline.kernels.attention_plan import AttentionPlan, count_decode_keys, make_prefill_tiles, pad_tiles
from emberline.kernels.cuda.decode import DeviceWorkList
from emberline.kernels.cuda.hopper_backend import HopperBackend
from emberline.kernels.cuda.latent import latent_attention
from emberline.kernels.latent_plan import ContextPass, LatentPlan, LatentScratch
from emberline.kernels.latent_planner import split_context

FP8 = torch.float8_e4m3fn
EPS = 1e-6


class Sizes(NamedTuple):
    heads: int
    plain: int
    rotary: int
    rank: int
    values: int


TINY = Sizes(6, 12, 8, 20, 10)
LITE = Sizes(16, 128, 64, 512, 128)  # DeepSeek-V2-Lite


def make_layer(sizes: Sizes, dtype: torch.dtype, device: str, *, interleaved: bool = True) -> LatentLayer:
    heads, plain, rotary, rank, values = sizes
    matrix = (torch.randn(heads * (plain + values), rank) * rank**-0.5).to(device, dtype)
    angles = torch.randn(4096, rotary, device=device)
    attention = AttentionLayer(
        heads, 1, rotary + rank, (plain + rotary) ** -0.5, angles, interleaved=interleaved, latent_dim=rank
    )
    norm = 1 + 0.2 * torch.randn(rank, device=device)
    products = HopperBackend.pack_latent_products(object.__new__(HopperBackend), matrix, heads, plain)
    return LatentLayer(attention, norm, EPS, plain, values, products)


@dataclass
class LatentCase:
    """Sequences with random latents in a paged cache, and projections of their new tokens."""

    inputs: LatentInputs
    decode_rows: int
    dense: list[Tensor]  # of each sequence: its cached keys, as float64

    @staticmethod
    def make(
        sizes: Sizes,
        decode: list[tuple[int, int]],
        chunks: list[tuple[int, int]],
        dtype: torch.dtype,
        cache: torch.dtype,
        device: str,
        *,
        block: int = 64,
        interleaved: bool = True,
    ) -> LatentCase:
        """`decode`, `chunks`: cached tokens and new tokens of each sequence."""
        layer, lengths = make_layer(sizes, dtype, device, interleaved=interleaved), [*decode, *chunks]
        need = [-(-(before + new) // block) for before, new in lengths]
        blocks, width = torch.randperm(sum(need) + 2).int().split([*need, 2]), sizes.rotary + sizes.rank
        tables = torch.full((len(lengths), max(need) + 1), 1 << 30, dtype=torch.int32)
        keys = torch.full((sum(need) + 2, 1, block, width), torch.nan).to(cache)
        dense, slots, positions = [], [], []
        raw = torch.uint8 if cache == FP8 else cache
        for row, own, (before, new) in zip(tables, blocks, lengths, strict=False):
            row[: len(own)] = own
            at = torch.arange(before + new)
            places = own.long()[at // block], at % block
            old = torch.randn(before, width).to(cache)
            keys.view(raw)[places[0][:before], 0, places[1][:before]] = old.view(raw)
            dense.append(old.double())
            slots.append((places[0] * block + places[1])[before:])
            positions.append(at[before:])
        counts = [new for _, new in lengths]
        metadata = AttentionMetadata(
            torch.cat(positions).int().to(device),
            torch.cat(slots).to(device),
            torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
            torch.tensor([before for before, _ in lengths], dtype=torch.int32, device=device),
            tables.to(device),
        )
        total, size = sum(counts), sizes.plain + sizes.rotary
        projected = torch.randn(total, sizes.heads * size + width).to(device, dtype)
        q, kv = projected.tensor_split([sizes.heads * size], dim=1)
        q = q.unflatten(1, (sizes.heads, size))
        return LatentCase(LatentInputs(q, kv, layer, keys.to(device), metadata), len(decode), dense)

    def make_plan(
        self, *, max_queries: int = 1, sms: int = 4, is_captured: bool = False, has_passes: bool = False
    ) -> AttentionPlan:
        """Return the plan that a LatentPlanner makes, for any device."""
        metadata, device, heads = self.inputs.metadata, self.inputs.q.device, self.inputs.layer.attention.q_heads
        counts, context = metadata.query_start.cpu().diff().numpy(), metadata.context.cpu().numpy()
        rows = self.decode_rows
        decode_tokens, chunks = int(counts[:rows].sum()), counts[rows:]
        split = split_context(context, counts, rows, self.inputs.keys.shape[2], heads) if has_passes else ()
        passes = tuple(ContextPass(*(torch.from_numpy(part).to(device) for part in one)) for one in split)
        has_context = bool((context[rows:] > 0).any()) and not passes
        limit = torch.tensor([int(counts.sum()) if has_context else decode_tokens], dtype=torch.int32, device=device)
        tiles = make_prefill_tiles(context, counts, rows)
        tiles = pad_tiles(tiles, len(tiles) + 2 * is_captured)
        capacity = work_limits.max_work_items(rows, 1, sms)
        places = (capacity + rows) * max_queries * heads
        plan = AttentionPlan(
            rows,
            max_queries,
            latent=LatentPlan(decode_tokens, has_context or is_captured, limit, passes),
            latent_scratch=LatentScratch(
                torch.full((places * self.inputs.keys.shape[3],), torch.nan, device=device),
                torch.full((places * 2,), torch.nan, device=device),
            ),
            prefill_tiles=torch.from_numpy(tiles).to(device) if len(chunks) else None,
        )
        if rows:
            work = worklist.plan_decode_work(count_decode_keys(context[:rows], counts[:rows]), 1, sms, capacity)
            data = torch.from_numpy(work.data).to(device)
            plan = AttentionPlan(**{f: getattr(plan, f) for f in plan.__slots__} | {
                "decode_work": DeviceWorkList(data, rows, capacity)
            })  # fmt: skip
        return plan

    def compute_dense(self) -> Tensor:
        """Return attention with the keys and values of each head, in float64, and add the new keys to `dense`."""
        q, kv, layer, keys, metadata = self.inputs
        q, kv, rotary, plain = q.double(), kv.double(), layer.rotary_dim, layer.plain_dim
        at, starts, rank = metadata.positions.long(), metadata.query_start.tolist(), layer.rank
        assert layer.products.expansion is not None
        matrix = layer.products.expansion.weight.data.double().view(layer.attention.q_heads, -1, rank)
        normed = kv[:, :rank] * torch.rsqrt(kv[:, :rank].square().mean(-1, keepdim=True) + layer.eps)
        rotated = rotate(kv[:, None, rank:], at, layer)[:, 0]
        fresh = torch.cat([rotated, normed * layer.norm.double()], dim=1).to(keys.dtype).double()
        queries = torch.cat([q[..., :plain], rotate(q[..., plain:], at, layer)], dim=-1)
        outs = []
        for b, old in enumerate(self.dense):
            new = slice(starts[b], starts[b + 1])
            self.dense[b] = cached = torch.cat([old.to(fresh.device), fresh[new]])
            both = torch.einsum("tr,hnr->htn", cached[:, rotary:], matrix)
            shared = cached[None, :, :rotary].expand(len(matrix), -1, -1)
            k, v = torch.cat([both[..., :plain], shared], dim=-1), both[..., plain:]
            scores = torch.einsum("qhd,hkd->hqk", queries[new], k) * layer.attention.scale
            key = torch.arange(len(cached), device=scores.device)
            hidden = key[None, :] > key[len(old) :, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,hkv->qhv", weights, v).flatten(1))
        return torch.cat(outs)

    def check(self, *, max_queries: int = 1, is_captured: bool = False, has_passes: bool = False) -> None:
        dtype, keys, metadata = self.inputs.q.dtype, self.inputs.keys, self.inputs.metadata
        expected, before = self.compute_dense(), self.inputs.q.clone()
        ours = latent_attention(
            self.inputs,
            self.make_plan(max_queries=max_queries, is_captured=is_captured, has_passes=has_passes),
            None,
            lambda x, layer: x @ layer.weight.data.T,
            pdl=expected.is_cuda,
        )
        bound = 1e-5 if dtype is torch.float32 else 0.03
        error = (ours.double() - expected).abs() / expected.abs().max()
        assert error.isfinite().all() and error.max() < bound, f"error {float(error.max()):.2e}"
        plain = self.inputs.layer.plain_dim
        assert torch.equal(self.inputs.q[..., :plain], before[..., :plain])
        block = keys.shape[2]
        got = keys[metadata.slots // block, 0, metadata.slots % block].double()
        starts, context = metadata.query_start.tolist(), metadata.context.tolist()
        wanted = torch.cat([one[context[b] :][: starts[b + 1] - starts[b]] for b, one in enumerate(self.dense)])
        assert ((got - wanted).abs() <= wanted.abs() / (8 if keys.dtype == FP8 else 100) + 1e-2).all()


def rotate(x: Tensor, positions: Tensor, layer: LatentLayer) -> Tensor:
    cos, sin = layer.attention.cos_sin.double()[positions, None].chunk(2, dim=-1)
    if layer.attention.interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
