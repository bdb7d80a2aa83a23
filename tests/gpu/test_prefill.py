"""Prefill attention on the GPU: its error against float64 is at most twice that of torch in bf16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gpu_settings import needs_hopper_kernels
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from emberline.kernels.attention_plan import select_tiles_with_tokens
from emberline.kernels.cuda import prefill

gpu = needs_hopper_kernels

COUNTS = (1, 63, 64, 65, 127, 128, 129, 500)
CONTEXTS = (0, 1, 63, 64, 1000)
RAGGED = [(count, before) for count in COUNTS for before in CONTEXTS]


@dataclass
class Batch:
    """Requests of (new tokens, tokens before them) whose keys are in shuffled blocks of one cache."""

    requests: list[tuple[int, int]]
    q_heads: int
    kv_heads: int
    head_dim: int = 128
    block_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        make = torch.Generator("cuda").manual_seed(self.seed)
        counts, before = zip(*self.requests, strict=True)
        need = [-(-(count + past) // self.block_size) for count, past in self.requests]
        width, spare = max(need) + 3, 5
        blocks = sum(need) + spare
        free = torch.randperm(blocks, generator=make, device="cuda").tolist()
        tables = np.full(
            (len(need), width), 1 << 28, np.int32
        )  # an invalid block, to detect reads beyond a request's blocks
        for row, count in enumerate(need):
            tables[row, :count] = [free.pop() for _ in range(count)]
        shape = (2, blocks, 3, self.kv_heads, self.block_size, self.head_dim)  # blocks are not contiguous
        cache = torch.randn(shape, generator=make, device="cuda").bfloat16()
        self.k, self.v = cache[0, :, 1], cache[1, :, 1]
        columns = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = torch.randn(sum(counts), columns, generator=make, device="cuda").bfloat16() * 2
        self.starts = [0, *np.cumsum(counts).tolist()]
        self.tables = torch.from_numpy(tables).cuda()
        self.query_start = torch.tensor(self.starts, dtype=torch.int32, device="cuda")
        self.context = torch.tensor(before, dtype=torch.int32, device="cuda")
        self.work = torch.from_numpy(prefill.make_tiles(counts, before)).cuda()
        self.scale = self.head_dim**-0.5

    def ours(self, window: int = 0, *, pdl: bool = True) -> Tensor:
        out = self.qkv.new_full((len(self.qkv), self.q_heads * self.head_dim), torch.nan)
        cached = prefill.PrefillTensorMaps(self.k, self.v)
        return prefill.prefill_attention(
            self.qkv, cached, self.tables, self.query_start, self.context, self.work, self.scale, self.q_heads,
            window=window, out=out, pdl=pdl,
        )  # fmt: skip

    def dense(self, row: int, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v [heads, tokens, dim] of a request, and the mask of visible keys."""
        count, past = self.requests[row]
        length = count + past
        blocks = self.tables[row, : -(-length // self.block_size)].long()
        k, v = (
            c[blocks].transpose(0, 1).reshape(self.kv_heads, -1, self.head_dim)[:, :length] for c in (self.k, self.v)
        )
        q = self.qkv[self.starts[row] : self.starts[row + 1]].view(count, -1, self.head_dim)[:, : self.q_heads]
        group = self.q_heads // self.kv_heads
        key = torch.arange(length, device="cuda")
        at = torch.arange(past, length, device="cuda")[:, None]
        seen = (key <= at) & (key > at - (window or length))
        return q.transpose(0, 1), k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), seen

    def check(self, window: int = 0) -> Tensor:
        got = self.ours(window)
        assert not got.isnan().any(), "some outputs were not written"
        worst = [0.0, 0.0]
        for row, request in enumerate(self.requests):
            q, k, v, seen = self.dense(row, window)
            mine = got[self.starts[row] : self.starts[row + 1]].view(request[0], self.q_heads, -1).transpose(0, 1)
            scores = (q.double() @ k.double().transpose(1, 2) * self.scale).masked_fill(~seen, -torch.inf)
            exact = scores.softmax(-1) @ v.double()
            peer = scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=self.scale)[0]
            off, theirs = mine.double() - exact, peer.double() - exact
            assert off.norm() <= 2 * theirs.norm(), f"{request}: {off.norm():.3g} against {theirs.norm():.3g}"
            worst = [max(worst[0], float(off.abs().max())), max(worst[1], float(theirs.abs().max()))]
        assert worst[0] <= 2 * worst[1], worst
        return got


@gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 2)])
def test_ragged_batches(heads: tuple[int, int]) -> None:
    Batch(RAGGED, *heads).check()


@gpu
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    Batch(RAGGED, 4, 1, block_size=block_size).check()


@gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 256])
@pytest.mark.parametrize("window", [0, 100])
def test_head_sizes(block_size: int, head_dim: int, window: int) -> None:
    Batch(RAGGED, 6, 2, head_dim=head_dim, block_size=block_size).check(window)


@gpu
@pytest.mark.parametrize("window", [1, 17, 64, 128, 129, 700])
def test_windows(window: int) -> None:
    Batch(RAGGED, 4, 2).check(window)


@gpu
def test_long_prompt_with_single_tokens() -> None:
    Batch([(1, 4000), (3000, 0), (1, 0), (700, 2100), (1, 127), (1, 128)], 8, 2).check()


@gpu
def test_same_bits_in_any_batch() -> None:
    batch = Batch(RAGGED, 8, 2)
    once = batch.check()
    assert torch.equal(once, batch.ours(pdl=False))
    row = RAGGED.index((500, 1000))
    first, last = batch.starts[row], batch.starts[row + 1]
    alone = prefill.prefill_attention(
        batch.qkv[first:last], prefill.PrefillTensorMaps(batch.k, batch.v), batch.tables[row : row + 1],
        torch.tensor([0, 500], dtype=torch.int32, device="cuda"), batch.context[row : row + 1],
        torch.from_numpy(prefill.make_tiles([500], [1000])).cuda(), batch.scale, batch.q_heads,
    )  # fmt: skip
    assert torch.equal(once[first:last], alone)


@gpu
@pytest.mark.parametrize("window", [0, 200])
def test_same_bits_in_chunks(window: int) -> None:
    batch = Batch([(1000, 0)], 8, 2)
    whole = batch.ours(window)
    cached = prefill.PrefillTensorMaps(batch.k, batch.v)
    parts = []
    for first, last in ((0, 77), (77, 78), (78, 600), (600, 1000)):
        bounds = torch.tensor([0, last - first], dtype=torch.int32, device="cuda")
        before = torch.tensor([first], dtype=torch.int32, device="cuda")
        work = torch.from_numpy(prefill.make_tiles([last - first], [first])).cuda()
        parts.append(
            prefill.prefill_attention(
                batch.qkv[first:last], cached, batch.tables, bounds, before, work, batch.scale, 8, window=window
            )
        )
    assert torch.equal(whole, torch.cat(parts))


@gpu
def test_launches_leave_the_counters_at_zero() -> None:
    batch = Batch([(900, 100)] * 6, 32, 8)
    first = batch.ours()
    for _ in range(20):
        assert torch.equal(first, batch.ours())
    assert prefill._counters(batch.qkv.device).tolist() == [0, 0]


def test_tiles_cover_every_query_once_longest_first() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        counts = rng.integers(0, 700, rng.integers(1, 40))
        before = rng.integers(0, 3000, len(counts))
        work = prefill.make_tiles(counts.tolist(), before.tolist())
        assert work.dtype == np.int32 and work.flags.c_contiguous
        covered = [(r, q) for r, first in work for q in range(first, min(first + prefill.TILE_QUERIES, counts[r]))]
        assert sorted(covered) == [(r, q) for r, count in enumerate(counts) for q in range(count)]
        keys = [before[r] + min(first + prefill.TILE_QUERIES, counts[r]) for r, first in work]
        assert keys == sorted(keys, reverse=True)


def test_tiles_with_logit_tokens() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        counts = rng.integers(0, 700, rng.integers(1, 40))
        sought = np.unique(rng.integers(0, max(1, counts.sum()), rng.integers(0, 50)))
        sought = sought[sought < counts.sum()]
        tiles = prefill.make_tiles(counts, np.zeros_like(counts))
        begins = np.cumsum(counts) - counts
        held = [
            [r, first]
            for r, first in tiles.tolist()
            if any(begins[r] + q in sought for q in range(first, min(first + prefill.TILE_QUERIES, counts[r])))
        ]
        assert select_tiles_with_tokens(tiles, counts, sought).tolist() == held


def test_no_new_tokens_give_no_tiles() -> None:
    assert prefill.make_tiles([0, 0], [5, 0]).shape == (0, 2)


def test_shared_memory_fits_an_sm() -> None:
    assert max(prefill.shared_bytes(dim) for dim in prefill.HEAD_DIMS) <= 227 << 10
