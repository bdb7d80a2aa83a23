"""Decode attention is close to exact sums, and independent of the batch, padding and graph replays.

Rows with several queries have the same bits as rows of one query that are cut at the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu_settings import needs_hopper_kernels
from torch import Tensor

from emberline.kernels import work_limits, worklist
from emberline.kernels.cuda.decode import DecodeScratch, DecodeTensorMaps, DeviceWorkList, decode_attention

pytestmark = needs_hopper_kernels

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
SMS = 132
MANY = 4096  # a number of SMs for which every tile becomes an item
# Sequences with 0 to 8 new tokens: number of keys before them, number of new tokens.
DRAFTED = [(0, 8), (0, 1), (1, 3), (13, 5), (60, 8), (63, 1), (63, 2), (64, 4), (120, 0), (126, 6), (300, 7), (640, 5)]
DRAFTED += [(0, 0), (1000, 8), (1021, 8), (2040, 1), (2999, 5)]
# Query heads per KV head, and the most queries of a row: for space for 8, 16 and 32 heads, full or not.
GROUPS = [(1, 8), (1, 32), (2, 3), (2, 8), (4, 2), (4, 4), (4, 5), (4, 8), (7, 2), (7, 4), (8, 2), (8, 4), (16, 2)]
RAGGED = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 640, 641, 1000, 1024, 2048, 2999, 3000]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of given lengths with their cache; blocks are in random order, with a gap after the heads of each."""

    lengths: list[int]
    qkv: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    context: Tensor
    q_heads: int

    @staticmethod
    def random(
        lengths: list[int], q_heads: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype = BF16, block: int = 64
    ) -> Case:
        counts = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(counts)).add(1).int().split(counts)
        tables = torch.zeros(len(lengths), max(counts) + 3, dtype=torch.int32)
        for row, blocks in zip(tables, order, strict=True):
            row[: len(blocks)] = blocks
        shape = (sum(counts) + 1, kv_heads + 1, block, head_dim)
        keys, values = (torch.randn(shape, device="cuda").to(dtype)[:, :kv_heads] for _ in range(2))
        qkv = 2 * torch.randn(len(lengths), (q_heads + 2 * kv_heads) * head_dim, device="cuda")
        context = torch.tensor(lengths, dtype=torch.int32, device="cuda") - 1
        return Case(lengths, qkv.to(BF16), keys, values, tables.cuda(), context, q_heads)

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.q_heads, self.keys.shape[1], self.keys.shape[3]

    @property
    def scale(self) -> float:
        return float(self.heads[2] ** -0.5)

    def visible(self, cache: Tensor, row: int, window: int) -> Tensor:
        """Return the keys or values [kv_heads, keys, head_dim] that a row attends to."""
        length, (_, kv_heads, head_dim) = self.lengths[row], self.heads
        blocks = self.tables[row, : -(-length // cache.shape[2])].long()
        held = torch.stack([cache[b].to(BF16) for b in blocks.tolist()])
        first = max(0, length - window) if window else 0
        return held.transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, first:length]

    def reference(self, window: int = 0) -> tuple[Tensor, Tensor]:
        """Return the exact result, and that of torch in bf16."""
        q_heads, kv_heads, head_dim = self.heads
        exact, theirs = [], []
        for row in range(len(self.lengths)):
            q = self.qkv[row, : q_heads * head_dim].view(1, q_heads, 1, head_dim)
            k, v = (self.visible(cache, row, window)[None] for cache in (self.keys, self.values))
            theirs.append(F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True).flatten())
            wide = [t.double().repeat_interleave(q_heads // kv_heads, 1) for t in (k, v)]
            weights = (q.double() @ wide[0].transpose(2, 3) * self.scale).softmax(-1)
            exact.append((weights @ wide[1]).flatten())
        return torch.stack(exact), torch.stack(theirs)


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Rows of up to `max_queries` queries each. `tokens` has a row for each of these queries instead."""

    tokens: Case
    rows: worklist.DecodeRows
    tables: Tensor
    max_queries: int

    @staticmethod
    def random(
        sequences: list[tuple[int, int]], group: int, max_queries: int, head_dim: int, *,
        dtype: torch.dtype = BF16, block: int = 64, kv_heads: int = 2,
    ) -> DraftedRows:  # fmt: skip
        before, counts = (np.array(x, np.int32) for x in zip(*sequences, strict=True))
        whole = Case.random(
            (before + counts + 1).tolist(), group * kv_heads, kv_heads, head_dim, dtype=dtype, block=block
        )
        rows = worklist.split_decode_rows(before, counts, max_queries)
        lengths = [
            int(context) + j + 1 for context, count in zip(rows.context, rows.counts, strict=True) for j in range(count)
        ]
        owners = torch.from_numpy(np.repeat(rows.sequences, rows.counts))
        qkv = 2 * torch.randn(len(lengths), whole.qkv.shape[1], device="cuda")
        context = torch.tensor(lengths, dtype=torch.int32, device="cuda") - 1
        tokens = replace(whole, lengths=lengths, qkv=qkv.to(BF16), tables=whole.tables[owners], context=context)
        return DraftedRows(tokens, rows, whole.tables[torch.from_numpy(rows.sequences)], max_queries)

    @property
    def lengths(self) -> list[int]:
        """The number of keys of each row, which is 0 for a row without queries."""
        return np.where(self.rows.counts > 0, self.rows.context + self.rows.counts, 0).tolist()

    def work(self, lengths: list[int], *, sms: int = SMS, part_tiles: int | None = None) -> DeviceWorkList:
        """Return a work list for rows of these lengths, which may be those of the tokens too."""
        q_heads, kv_heads, _ = self.tokens.heads
        room = max(work_limits.max_work_items(len(lengths), kv_heads, sms), sum(n // 64 + 1 for n in lengths))
        ctas = worklist.ctas_per_sm(q_heads // kv_heads, self.max_queries, self.tokens.heads[2])
        made = worklist.plan_decode_work(lengths, kv_heads, sms, room, part_tiles=part_tiles, ctas_per_sm=ctas)
        return DeviceWorkList(torch.from_numpy(made.data).cuda(), len(lengths), room)

    def run(self, work: DeviceWorkList, *, window: int = 0) -> Tensor:
        case = self.tokens
        scratch = DecodeScratch(
            work.rows, work.capacity, *case.heads, torch.device("cuda"), max_queries=self.max_queries
        )
        scratch.partials.fill_(torch.nan)
        scratch.max_and_sum.fill_(torch.nan)
        out = torch.full((len(case.qkv), case.q_heads * case.heads[2]), torch.nan, device="cuda", dtype=BF16)
        context = torch.from_numpy(self.rows.context).cuda()
        starts = torch.tensor([0, *np.cumsum(self.rows.counts)], dtype=torch.int32, device="cuda")
        decode_attention(
            case.qkv, DecodeTensorMaps(case.keys, case.values), self.tables, context, work, case.scale, *case.heads,
            window=window, out=out, scratch=scratch, pdl=False, query_start=starts, max_queries=self.max_queries,
        )  # fmt: skip
        assert not scratch.counters.any()
        return out

    def run_tokens_alone(self, part_tiles: int, *, window: int = 0) -> Tensor:
        """Compute every query as a row of its own, cut at the same keys as the row that it is part of."""
        lengths = np.repeat(self.lengths, self.rows.counts).tolist()
        return run(self.tokens, self.work(lengths, part_tiles=part_tiles), window=window)


def work_for(case: Case, *, sms: int = SMS, lengths: list[int] | None = None) -> DeviceWorkList:
    rows, kv_heads = len(case.lengths), case.heads[1]
    room = work_limits.max_work_items(rows, kv_heads, sms)
    made = worklist.plan_decode_work(np.array(lengths or case.lengths, np.int32), kv_heads, sms, room)
    return DeviceWorkList(torch.from_numpy(made.data).cuda(), rows, room)


def scratch_of(case: Case, work: DeviceWorkList) -> DecodeScratch:
    made = DecodeScratch(work.rows, work.capacity, *case.heads, torch.device("cuda"))
    made.partials.fill_(torch.nan)
    made.max_and_sum.fill_(torch.nan)
    return made


def run(
    case: Case, work: DeviceWorkList | None = None, *, window: int = 0, scratch: DecodeScratch | None = None
) -> Tensor:
    work = work or work_for(case)
    scratch = scratch or scratch_of(case, work)
    out = torch.full((len(case.qkv), case.q_heads * case.heads[2]), torch.nan, device="cuda", dtype=BF16)
    cached = DecodeTensorMaps(case.keys, case.values)
    decode_attention(
        case.qkv, cached, case.tables, case.context, work, case.scale, *case.heads, window=window, out=out,
        scratch=scratch, pdl=False,
    )  # fmt: skip
    assert not scratch.counters.any()
    return out


def assert_close(ours: Tensor, case: Case, *, window: int = 0) -> None:
    assert_near(ours, *case.reference(window))


def assert_near(ours: Tensor, exact: Tensor, theirs: Tensor) -> None:
    """Assert that the error is at most twice that of torch, in the worst element and on average."""
    floor = 1e-6 * exact.abs().max().item()
    for norm in (torch.max, torch.mean):
        mine, other = (norm((y.double() - exact).abs()).item() for y in (ours, theirs))
        assert mine <= 2 * other + floor, f"{norm.__name__}: ours {mine:.3e}, torch {other:.3e}"


@pytest.mark.parametrize("dtype", [BF16, F8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_heads,kv_heads", [(8, 8), (4, 2), (32, 8), (8, 1), (16, 1), (24, 2), (9, 3), (11, 1)])
def test_ragged(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = Case.random(RAGGED, q_heads, kv_heads, head_dim, dtype=dtype)
    for sms in (1, SMS, MANY):  # few cuts, the usual number, every tile an item
        assert_close(run(case, work_for(case, sms=sms)), case)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, F8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_block_sizes(head_dim: int, dtype: torch.dtype, block: int) -> None:
    case = Case.random(RAGGED, 8, 2, head_dim, dtype=dtype, block=block)
    assert_close(run(case), case)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 500, 4096])
@pytest.mark.parametrize("block", [16, 64])
def test_windows(block: int, window: int) -> None:
    case = Case.random(RAGGED, 8, 2, 128, block=block)
    for sms in (1, MANY):
        assert_close(run(case, work_for(case, sms=sms), window=window), case, window=window)


@pytest.mark.parametrize("dtype", [BF16, F8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group,max_queries", GROUPS)
def test_rows_with_several_queries(group: int, max_queries: int, head_dim: int, dtype: torch.dtype) -> None:
    case = DraftedRows.random(DRAFTED, group, max_queries, head_dim, dtype=dtype)
    expected = case.tokens.reference()
    for sms in (1, SMS, MANY):  # few cuts, the usual number, every tile an item
        assert_near(case.run(case.work(case.lengths, sms=sms)), *expected)


@pytest.mark.parametrize("dtype", [BF16, F8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group,max_queries", GROUPS)
def test_queries_of_a_row_have_the_bits_of_rows_of_one(
    group: int, max_queries: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = DraftedRows.random(DRAFTED, group, max_queries, head_dim, dtype=dtype)
    for part_tiles in (1, 3, 64):  # every tile an item, parts of several tiles, whole rows
        for window in (0, 1, 70):
            together = case.run(case.work(case.lengths, part_tiles=part_tiles), window=window)
            assert torch.equal(together, case.run_tokens_alone(part_tiles, window=window)), (part_tiles, window)


@pytest.mark.parametrize("window", [1, 5, 64, 65, 500, 4096])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("max_queries", [2, 4, 8])
def test_windows_and_blocks_with_several_queries(max_queries: int, block: int, window: int) -> None:
    case = DraftedRows.random(DRAFTED, 4, max_queries, 128, block=block)
    expected = case.tokens.reference(window)
    for sms in (1, MANY):
        assert_near(case.run(case.work(case.lengths, sms=sms), window=window), *expected)


@pytest.mark.parametrize("max_queries", [2, 4, 8])
def test_more_units_with_several_queries_than_the_grid(max_queries: int) -> None:
    """The queue distributes the units, short ones too, of which the producer is several ahead."""
    sequences = [(int(n), i % (max_queries + 1)) for i, n in enumerate(torch.randint(0, 400, (300,)))]
    for head_dim, dtype in ((64, F8), (128, BF16)):
        case = DraftedRows.random(sequences, 4, max_queries, head_dim, dtype=dtype, kv_heads=8)
        ours = case.run(case.work(case.lengths, part_tiles=1))
        assert_close(ours, case.tokens)
        assert torch.equal(ours, case.run_tokens_alone(1))


def test_work_list_for_longer_rows_with_several_queries() -> None:
    case = DraftedRows.random(DRAFTED, 4, 5, 128)
    work = case.work([n + 200 if n else 0 for n in case.lengths], sms=MANY)
    assert_close(case.run(work), case.tokens)


def test_one_long_row_among_short_ones() -> None:
    case = Case.random([100] * 31 + [30_000] + [1] * 32, 32, 8, 128)
    assert_close(run(case), case)


def test_more_units_than_the_grid() -> None:
    """The queue distributes the units and is reset at the end."""
    case = Case.random([int(n) for n in torch.randint(1, 400, (300,))], 8, 8, 64)
    work = work_for(case)
    scratch = scratch_of(case, work)
    ours = run(case, work, scratch=scratch)
    assert_close(ours, case)
    assert torch.equal(run(case, work, scratch=scratch), ours)


def test_work_list_for_longer_rows() -> None:
    """Keys beyond a row's length are ignored, even in items that have no other keys."""
    case = Case.random(RAGGED, 32, 8, 128)
    work = work_for(case, sms=MANY, lengths=[n + 200 for n in RAGGED])
    assert_close(run(case, work), case)


def test_rows_are_independent() -> None:
    case = Case.random(RAGGED, 32, 8, 128)
    ours, work = run(case), work_for(case)
    assert (work.partial_starts[1:] > 0).any()
    order = torch.randperm(len(RAGGED))
    moved = Case(
        [RAGGED[i] for i in order.tolist()], case.qkv[order], case.keys, case.values, case.tables[order],
        case.context[order], case.q_heads,
    )  # fmt: skip
    assert torch.equal(run(moved), ours[order])


def test_padding_rows_do_not_affect_others() -> None:
    case = Case.random([700, 64, 1, 1, 1, 1], 32, 8, 128)
    case.tables[3:] = 0
    ours = run(case)
    assert_close(ours, case)
    fewer = Case([700, 64, 1], case.qkv[:3], case.keys, case.values, case.tables[:3], case.context[:3], case.q_heads)
    assert torch.equal(run(fewer), ours[:3])


def test_strided_queries() -> None:
    case = Case.random([700, 64, 129], 8, 2, 128)
    wide = torch.full((3, case.qkv.shape[1] + 64), torch.nan, device="cuda", dtype=BF16)
    wide[:, : case.qkv.shape[1]] = case.qkv
    ours = run(case)
    assert torch.equal(run(Case(case.lengths, wide[:, :-64], *_inputs(case))), ours)


@pytest.mark.parametrize("dtype", [BF16, F8], ids=["bf16", "fp8"])
def test_cuda_graph_replays_with_changing_lengths(dtype: torch.dtype) -> None:
    """One graph of dependent launches shares a scratch; lengths, tables and lists change between replays."""
    rows = 24
    longest = Case.random([3000] * rows, 32, 8, 128, dtype=dtype)
    work = work_for(longest)
    scratch = scratch_of(longest, work)
    cached = DecodeTensorMaps(longest.keys, longest.values)
    swapped = DecodeTensorMaps(longest.values, longest.keys)
    qkv, context = torch.zeros_like(longest.qkv), longest.context.clone()
    outs = [torch.empty(rows, 32 * 128, device="cuda", dtype=BF16) for _ in range(4)]

    def run_chain() -> None:
        torch.mul(longest.qkv, 1, out=qkv)  # the preceding kernel
        for i, out in enumerate(outs):
            decode_attention(
                qkv, (cached, swapped)[i % 2], longest.tables, context, work, longest.scale, *longest.heads,
                out=out, scratch=scratch,
            )  # fmt: skip

    run_chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_chain()
    for most in (3000, 5, 700, 64, 1500):
        lengths = [int(n) for n in torch.randint(1, most + 1, (rows,))]
        context.copy_(torch.tensor(lengths) - 1)
        work.copy_from_host(worklist.plan_decode_work(np.array(lengths, np.int32), 8, SMS, work.capacity))
        longest.qkv.normal_()
        for out in outs:
            out.fill_(torch.nan)
        scratch.partials.fill_(torch.nan)
        graph.replay()
        now = Case(lengths, longest.qkv, longest.keys, longest.values, longest.tables, context, 32)
        other = Case(lengths, longest.qkv, longest.values, longest.keys, longest.tables, context, 32)
        assert_close(outs[0], now)
        for i, out in enumerate(outs):
            assert torch.equal(out, run((now, other)[i % 2], work)), (most, i)
        assert not scratch.counters.any()


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    return case.keys, case.values, case.tables, case.context, case.q_heads
