"""Prefill and decode attention at the same time: no read before a write, and the results of runs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from gpu_settings import needs_hopper_kernels
from torch import Tensor

from emberline.kernels import ops, worklist

pytestmark = needs_hopper_kernels

Q, KV, DIM, BLOCK = 32, 8, 128, 64
WIDTH = 64  # columns of the input from which queries, keys and values are computed


@dataclass
class Step:
    """Decode rows, then prefill chunks, given as (tokens, tokens before them)."""

    rows: list[tuple[int, int]]
    window: int = 0
    dtype: torch.dtype = torch.bfloat16  # dtype of keys and values
    widened: int = 0
    drafted: int = 0  # the first sequences, whose tokens become decode rows of up to max_queries each
    max_queries: int = 1

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        counts, before = (np.array(x, np.int32) for x in zip(*self.rows, strict=True))
        self.singles = sum(count == 1 for count, _ in self.rows)  # tokens of decode rows
        need = -(-(counts + before) // BLOCK)
        order = torch.randperm(int(need.sum())).int().split(need.tolist())
        tables = torch.zeros(len(need), int(need.max()), dtype=torch.int32)
        for row, blocks in zip(tables, order, strict=True):
            row[: len(blocks)] = blocks
        shape = (int(need.sum()), KV, BLOCK, DIM)
        self.keys, self.values = (torch.randn(shape, device="cuda").to(self.dtype) for _ in range(2))
        self.counts, self.before = counts, before
        positions = [at for count, past in self.rows for at in range(past, past + count)]
        owners = np.repeat(np.arange(len(counts)), counts)
        slots = [int(tables[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in zip(owners, positions, strict=True)]
        self.metadata = ops.AttentionMetadata(
            positions=torch.tensor(positions, dtype=torch.int32, device="cuda"),
            slots=torch.tensor(slots, dtype=torch.int64, device="cuda"),
            query_start=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device="cuda"),
            context=torch.from_numpy(before).cuda(),
            block_tables=tables.cuda(),
        )
        angles = torch.arange(max(positions) + 1, device="cuda")[:, None] * torch.rand(DIM // 2, device="cuda")
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.layer = ops.AttentionLayer(Q, KV, DIM, scale=DIM**-0.5, cos_sin=cos_sin, window=self.window)
        self.cutter = ops.AttentionPlanner(
            *((Q, KV, DIM), self.keys[None], torch.bfloat16, int(counts.sum())),
            ops.PlannerOptions(max_widened_blocks=self.widened, max_queries=self.max_queries),
        )
        self.qkv = torch.empty(len(positions), (Q + 2 * KV) * DIM, device="cuda", dtype=torch.bfloat16)
        self.weight = ops.pack_linear(torch.randn(self.qkv.shape[1], WIDTH, device="cuda").mul_(0.25).bfloat16())
        self.tiles = self.cut_drafted_rows() if self.drafted else self.cut(self.singles)

    def cut(self, decode_rows: int) -> ops.AttentionPlan:
        queries = self.max_queries if decode_rows else 1
        return self.cutter.plan(
            self.before, self.counts, decode_rows, lambda x: torch.from_numpy(x).cuda(), max_queries=queries
        )

    def cut_drafted_rows(self) -> ops.AttentionPlan:
        """Split the drafted sequences into decode rows, and plan these."""
        rows = worklist.split_decode_rows(self.before[: self.drafted], self.counts[: self.drafted], self.max_queries)
        sequences = np.concatenate([rows.sequences, np.arange(self.drafted, len(self.counts))])
        self.counts = np.concatenate([rows.counts, self.counts[self.drafted :]])
        self.before = np.concatenate([rows.context, self.before[self.drafted :]])
        self.singles = int(rows.counts.sum())
        self.metadata = replace(
            self.metadata,
            query_start=torch.tensor([0, *np.cumsum(self.counts)], dtype=torch.int32, device="cuda"),
            context=torch.from_numpy(self.before).cuda(),
            block_tables=self.metadata.block_tables[torch.from_numpy(sequences)],
        )
        return self.cut(len(rows.counts))

    def attend(self, tiles: ops.AttentionPlan) -> Tensor:
        return ops.paged_attention(
            self.qkv, self.layer, self.keys, self.values, self.metadata, tiles.with_block_tables()
        )

    def run_layer(self, source: Tensor, then: Callable[[], object] = lambda: None) -> Tensor:
        """Run the kernels of a layer, which may start before the preceding one ends. `then` is called after each.

        The kernels before attention write what it reads.
        """
        ops.linear(source, ops.LinearLayer(self.weight), out=self.qkv)
        then()
        ops.rope_and_cache(self.qkv, self.layer, self.keys, self.values, self.metadata)
        then()
        out = self.attend(self.tiles)
        then()
        return out

    def sources(self, count: int) -> list[Tensor]:
        return [torch.randn(len(self.qkv), WIDTH, device="cuda").bfloat16() for _ in range(count)]


FEW = [(1, 500)] * 3 + [(700, 3000), (40, 0)]
MANY = [(1, 100 + 63 * i) for i in range(64)] + [(900, 2048), (129, 5)]
SHORT = [(1, i) for i in range(200)] + [(8, 0), (16, 3)]
CHAINED = [(1, 700 + i) for i in range(20)] + [(60, 300)]  # few enough for our own products, which use PDL too
# Drafted sequences, some of which have new keys in two tiles.
DRAFTED = [(5, 60), (9, 59), (1, 63), (3, 700), (9, 1018), (0, 5), (8, 0), (6, 190)] + [
    (5, 61 + 64 * i) for i in range(20)
]
CASES = {"few": FEW, "many": MANY, "short": SHORT, "chained": CHAINED}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [0, 150])
def test_prefill_is_bitwise_and_decode_nearly_as_alone(case: str, window: int) -> None:
    step = Step(CASES[case], window)
    assert step.tiles.prefill_sms is not None and step.tiles.decode_work is not None
    (source,) = step.sources(1)
    together = step.run_layer(source)
    as_chunks = step.attend(step.cut(0))  # one kernel computes all rows; test_prefill checks its results
    assert torch.equal(together[step.singles :], as_chunks[step.singles :])
    torch.testing.assert_close(together[: step.singles], as_chunks[: step.singles], atol=0.02, rtol=0.02)


def assert_replays_equal_synchronous_runs(step: Step) -> None:
    """Assert that graph replays of several layers give the results of a wait after each kernel."""
    sources = step.sources(6)
    expected = [step.run_layer(source, torch.cuda.synchronize) for source in sources]
    given = [torch.empty_like(source) for source in sources]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [step.run_layer(source) for source in given]
    for turn in range(30):
        order = [(i + turn) % len(sources) for i in range(len(sources))]
        for place, i in zip(given, order, strict=True):
            place.copy_(sources[i])
        graph.replay()
        torch.cuda.synchronize()
        for mine, i in zip(got, order, strict=True):
            assert torch.equal(mine, expected[i]), turn
    scratch = step.tiles.decode_scratch
    assert scratch is not None and not scratch.counters.any(), "the queue and the arrivals must be reset"


@pytest.mark.parametrize("case", CASES)
def test_no_value_is_read_before_it_is_written(case: str) -> None:
    step = Step(CASES[case])
    assert_replays_equal_synchronous_runs(step)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [0, 150])
def test_float8_is_widened_for_prefill(case: str, window: int) -> None:
    """Results are close to a kernel that reads float8 itself, and bitwise equal to those of a bf16 cache."""
    step = Step(CASES[case], window, torch.float8_e4m3fn, widened=400)
    assert step.tiles.widened is not None and step.tiles.unwidened_tiles is None
    (source,) = step.sources(1)
    together = step.run_layer(source)
    chunks = -(-(step.counts + step.before)[step.singles :] // BLOCK)
    for blocks in (1, int(chunks[0])) if len(chunks) > 1 else (1,):  # memory for no chunk, and for the first
        step.cutter = ops.AttentionPlanner(
            *((Q, KV, DIM), step.keys[None], torch.bfloat16, len(step.counts)),
            ops.PlannerOptions(max_widened_blocks=blocks),
        )
        general = step.cut(step.singles)
        assert general.unwidened_tiles is not None, "the memory must not suffice for all of these"
        assert general.prefill_tiles is not None and (blocks == 1 or len(general.prefill_tiles))
        torch.testing.assert_close(together, step.attend(general), atol=0.02, rtol=0.02)
    step.keys, step.values = step.keys.bfloat16(), step.values.bfloat16()
    step.cutter = ops.AttentionPlanner((Q, KV, DIM), step.keys[None], torch.bfloat16, len(step.counts))
    assert torch.equal(together[step.singles :], step.attend(step.cut(step.singles))[step.singles :])


def test_layers_share_widened_memory_safely() -> None:
    """Layers share the memory of widened blocks; in a graph and with PDL, none reads another's."""
    step = Step(MANY, 0, torch.float8_e4m3fn, widened=400)
    sources = step.sources(4)
    expected = [step.run_layer(source, torch.cuda.synchronize) for source in sources]
    given = [source.clone() for source in sources]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [step.run_layer(source) for source in given]
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        for mine, wanted in zip(got, expected, strict=True):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("chunks", [[], [(700, 3000), (40, 0)]], ids=["alone", "beside prefill"])
@pytest.mark.parametrize("max_queries", [2, 4, 5, 8])
@pytest.mark.parametrize("window", [0, 150])
def test_drafted_sequences_share_reads(window: int, max_queries: int, chunks: list[tuple[int, int]]) -> None:
    """Decode rows with several tokens are nearly as prefill computes them, and prefill beside them is the same."""
    step = Step([*DRAFTED, *chunks], window, drafted=len(DRAFTED), max_queries=max_queries)
    assert step.tiles.decode_work is not None and (step.tiles.prefill_sms is not None) == bool(chunks)
    (source,) = step.sources(1)
    together = step.run_layer(source)
    as_chunks = step.attend(step.cut(0))
    assert torch.equal(together[step.singles :], as_chunks[step.singles :])
    torch.testing.assert_close(together[: step.singles], as_chunks[: step.singles], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("chunks", [[], [(60, 300)]], ids=["alone", "beside prefill"])
@pytest.mark.parametrize("max_queries", [2, 4, 5, 8])
@pytest.mark.parametrize("sequences", [3, len(DRAFTED)])
def test_no_key_of_a_draft_is_read_before_it_is_written(
    sequences: int, max_queries: int, chunks: list[tuple[int, int]]
) -> None:
    """Keys that other rows of a sequence write are not read early either."""
    step = Step([*DRAFTED[:sequences], *chunks], drafted=sequences, max_queries=max_queries)
    assert_replays_equal_synchronous_runs(step)
