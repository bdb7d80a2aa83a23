"""Measures decode attention of one layer of Llama 3.1 8B.

The cases are batches with 640 keys per sequence, batches with uneven lengths, an fp8 cache, and sequences with a draft,
whose queries share one read of the keys or are rows of their own. Run it with `python -m emberline.bench.gpu.decode`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from emberline.bench.gpu.timing import count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels import work_limits, worklist
from emberline.kernels.cuda.decode import DecodeScratch, DecodeTensorMaps, DeviceWorkList, decode_attention
from emberline.kernels.cuda.driver import count_sms

BYTES_PER_US = 4.39e6  # read bandwidth of an H200, measured by a plain reduction
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
KEYS_PER_ROW = 640
BATCHES = (1, 8, 32, 64, 128, 256)
UNEVEN_LENGTHS = [300] * 255 + [30_000]
MIN_LAYERS = 2
DRAFT_BATCHES, DRAFT_LENGTHS, DRAFT_QUERIES = (1, 8, 32, 64), (640, 4096), 5  # a token and its draft of four


def measure(report: BenchReport) -> None:
    for batch in BATCHES:
        _measure_batch(report, f"decode b={batch}", [KEYS_PER_ROW] * batch, torch.bfloat16)
    _measure_batch(report, "decode uneven", UNEVEN_LENGTHS, torch.bfloat16)
    _measure_batch(report, "decode 30000", [30_000], torch.bfloat16)
    for batch in (1, 64, 256):
        _measure_batch(report, f"decode fp8 b={batch}", [KEYS_PER_ROW] * batch, torch.float8_e4m3fn)
    for length in DRAFT_LENGTHS:
        for batch in DRAFT_BATCHES:
            _measure_drafts(report, f"decode draft b={batch} keys={length}", [length] * batch)


def _measure_batch(report: BenchReport, name: str, lengths: list[int], dtype: torch.dtype) -> None:
    size = count_bytes_read(lengths, dtype)
    layers = DecodeInputs(lengths, dtype, max(MIN_LAYERS, count_input_sets(size)))
    ours, alone = (
        time_graph_replay(layers.make_attention_calls()),
        time_graph_replay(layers.make_attention_calls(use_pdl=False)),
    )
    limit = size / BYTES_PER_US
    report.add(name, ours, "us", limit=limit)
    report.add(f"{name} without pdl", alone, "us", limit=limit)
    print(f"{name}: {ours:.2f} us ({limit / ours:.0%} of memory), without pdl {alone:.2f}", flush=True)
    del layers
    torch.cuda.empty_cache()


def _measure_drafts(report: BenchReport, name: str, lengths: list[int]) -> None:
    """Measure sequences of DRAFT_QUERIES queries each, as one row and as a row for each query."""
    size = count_bytes_read(lengths, torch.bfloat16)
    layers = DecodeInputs(lengths, torch.bfloat16, max(MIN_LAYERS, count_input_sets(size)), queries=DRAFT_QUERIES)
    together = time_graph_replay(layers.make_attention_calls())
    layers.use_rows_of_one_query()
    apart, limit = time_graph_replay(layers.make_attention_calls()), size / BYTES_PER_US
    report.add(name, together, "us", limit=limit)
    report.add(f"{name} as rows of one query", apart, "us", limit=limit)
    print(f"{name}: {together:.2f} us ({limit / together:.0%} of memory), rows of one query {apart:.2f}", flush=True)
    del layers
    torch.cuda.empty_cache()


def count_bytes_read(lengths: list[int], dtype: torch.dtype) -> int:
    return 2 * sum(lengths) * KV_HEADS * HEAD_DIM * dtype.itemsize


class DecodeInputs:
    """Random queries, and KV caches of several layers, for sequences of the given lengths.

    There are enough layers that their data does not fit into the L2 cache. Each sequence has `queries` new tokens.
    """

    def __init__(self, lengths: list[int], dtype: torch.dtype, layers: int, *, queries: int = 1) -> None:
        self.lengths, self._device, rows = np.array(lengths, np.int32), torch.device("cuda"), len(lengths)
        self._queries, tokens = queries, rows * queries
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        tables = torch.zeros(rows, max(counts), dtype=torch.int32)
        for row, blocks in zip(tables, torch.randperm(sum(counts)).int().split(counts), strict=True):
            row[: len(blocks)] = blocks
        shape = (layers, sum(counts), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        keys, values = (_random_tensor(shape, dtype) for _ in range(2))
        self._caches = [DecodeTensorMaps(k, v) for k, v in zip(keys, values, strict=True)]
        self._qkv = _random_tensor((tokens, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.bfloat16)
        self._out = torch.empty(tokens, Q_HEADS * HEAD_DIM, device=self._device, dtype=torch.bfloat16)
        context = torch.tensor(lengths, dtype=torch.int32, device=self._device) - queries
        self._tables_and_context = tables.to(self._device), context

    def use_rows_of_one_query(self) -> None:
        """From now on, compute each query as a separate row of the batch."""
        offsets = torch.arange(self._queries, dtype=torch.int32, device=self._device)
        tables, context = self._tables_and_context
        context = (context[:, None] + offsets).flatten()
        self._tables_and_context = tables.repeat_interleave(self._queries, 0), context
        self.lengths, self._queries = context.cpu().numpy() + 1, 1

    def make_attention_calls(
        self, *, use_pdl: bool = True, tiles_per_part: int | None = None
    ) -> list[Callable[[], Tensor]]:
        """Return one function per layer that computes the attention of that layer.

        The kernel splits each sequence into parts of `tiles_per_part` tiles; by default the size is chosen as in an
        engine step.
        """
        rows, sms = len(self.lengths), count_sms(self._device)
        parts = 0 if tiles_per_part is None else int((-(-self.lengths // (worklist.TILE_KEYS * tiles_per_part))).sum())
        capacity = max(parts, work_limits.max_work_items(rows, KV_HEADS, sms))
        heads, queries, (tables, context) = (Q_HEADS, KV_HEADS, HEAD_DIM), self._queries, self._tables_and_context
        ctas = worklist.ctas_per_sm(Q_HEADS // KV_HEADS, queries, HEAD_DIM)
        items = worklist.plan_decode_work(
            self.lengths, KV_HEADS, sms, capacity, part_tiles=tiles_per_part, ctas_per_sm=ctas
        )
        work = DeviceWorkList(torch.from_numpy(items.data).to(self._device), rows, capacity)
        scratch = DecodeScratch(rows, capacity, *heads, self._device, max_queries=queries)
        starts = queries * torch.arange(rows + 1, dtype=torch.int32, device=self._device)

        def make_call(cached: DecodeTensorMaps) -> Callable[[], Tensor]:
            return lambda: decode_attention(
                self._qkv, cached, tables, context, work, HEAD_DIM**-0.5, *heads,
                out=self._out, scratch=scratch, pdl=use_pdl, query_start=starts, max_queries=queries,
            )  # fmt: skip

        return [make_call(cached) for cached in self._caches]


def _random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of random numbers.

    It is filled one layer at a time, because temporary values for all layers would not fit into GPU memory.
    """
    numbers = torch.empty(shape, device="cuda", dtype=dtype)
    for part in numbers:
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16).to(dtype))
    return numbers


def main() -> None:
    report = BenchReport("gpu_decode")
    measure(report)
    report.print_and_save()


if __name__ == "__main__":
    main()
