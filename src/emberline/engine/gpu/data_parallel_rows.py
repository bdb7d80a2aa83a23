"""DataParallelRows: the rows of a step on a rank that attends to requests of its own (data-parallel attention).

Every rank knows the work of all ranks from the plan. It builds a batch of its own requests, whose blocks and states are
in its cache. Layers that ranks divide gather the rows of all ranks, compute their part, and return each rank the sums
of its rows. The numbers of rows are known before the step, so it can be captured:

- A captured step has one shape on all ranks, with room for the rows of the rank that has the most. A rank fills it up
  with padding, all of it if it has no request. Divided layers compute the padding of all ranks too.
- In an uncaptured step, each rank has as many rows as its requests need, and at least one, also of logits: no kernel
  gets an empty tensor.

Layers with experts are divided too. Each row goes to all ranks, not only to those that have its experts, because the
number of rows for each rank would depend on the data, and not be known before the step. So more rows are sent than in a
dispatch, and every rank computes the router for all rows. The leader gets the logits of all requests and samples. All
ranks receive all sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from emberline.core.plan import WorkItem
from emberline.engine.gpu.batch import DeviceBatch
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.shape import ShapeGrid, StepShape
from emberline.engine.gpu.staging import StagedInputs
from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.row_exchange import RowExchange


@dataclass(frozen=True, slots=True)
class ExchangedRows:
    """How a step exchanges rows with the other ranks, and which logits it computes."""

    rows: RowExchange
    logit_rows: RowExchange
    chosen: Tensor  # see ForwardBatch.chosen_rows

    def make_batch_fields(self, tokens: Tensor) -> dict[str, Any]:
        """Queue the exchange of the step's tokens between ranks, and return fields for ForwardBatch.

        `tokens`: those of this rank."""
        fields = {"exchange": self.rows, "logit_exchange": self.logit_rows, "chosen_rows": self.chosen}
        return {"all_tokens": self.rows.gather(tokens), **fields}


@dataclass(frozen=True)
class RankWork:
    """The part of a step's work whose requests have the same DP rank: the rank that attends to them."""

    singles: list[WorkItem]
    chunks: list[WorkItem]

    @property
    def all(self) -> list[WorkItem]:
        return [*self.singles, *self.chunks]

    @cached_property
    def single_tokens(self) -> int:
        return sum(len(w.tokens) for w in self.singles)

    @cached_property
    def chunk_tokens(self) -> int:
        return sum(len(w.tokens) for w in self.chunks)

    @cached_property
    def num_logits(self) -> int:
        return self.single_tokens + sum(_count_chunk_logits(w) for w in self.chunks)


@dataclass(frozen=True)
class DividedStep:
    """The work of a step, divided by the DP ranks of its requests."""

    singles: Sequence[WorkItem]
    chunks: Sequence[WorkItem]
    work_by_rank: Sequence[RankWork]  # by rank

    @cached_property
    def num_logits(self) -> int:
        return sum(work.num_logits for work in self.work_by_rank)

    @property
    def longest_single(self) -> int:
        """The most tokens of a decoding request in this step, with its draft; 1: no request decodes."""
        return max((len(w.tokens) for w in self.singles), default=1)

    def find_logits(self, offsets: Sequence[int], single_rows: Sequence[int]) -> np.ndarray:
        """Return the index of each request's logits in the joined logits of all ranks.

        The result is in the order of sampling. `offsets`: index of each rank's first logits. `single_rows`: for each
        rank, how many rows of logits come before those of its prompt chunks."""
        chunk_offsets = np.array(offsets, np.int64) + np.array(single_rows, np.int64)
        singles = _place_in_order(self.singles, [len(w.tokens) for w in self.singles], np.array(offsets, np.int64))
        chunks = _place_in_order(self.chunks, [_count_chunk_logits(w) for w in self.chunks], chunk_offsets)
        return np.concatenate([singles, chunks])


class DataParallelRows:
    def __init__(self, comm: Communicator, max_logits: int, *, counts_rows: bool = False) -> None:
        """`comm`: connects the ranks with requests of their own. `max_logits`: maximum logit rows of a captured step.

        `counts_rows`: whether steps must know which rows are padding, because the rows of each expert are counted."""
        self._comm, self._max_logits, self._counts_rows = comm, max_logits, counts_rows

    def divide(self, singles: Sequence[WorkItem], chunks: Sequence[WorkItem]) -> DividedStep:
        work_by_rank = [RankWork([], []) for _ in range(self._comm.size)]
        for w in singles:
            work_by_rank[w.dp_rank].singles.append(w)
        for w in chunks:
            work_by_rank[w.dp_rank].chunks.append(w)
        return DividedStep(singles, chunks, work_by_rank)

    def rank_work(self, step: DividedStep) -> RankWork:
        return step.work_by_rank[self._comm.rank]

    def find_shape(
        self, step: DividedStep, grid: ShapeGrid, queries: int, planner: ops.AttentionPlanner
    ) -> StepShape | None:
        """Return the shape of a captured step with room for the work of each rank; None: there is none.

        Without a shape, the step must run uncaptured. All ranks find the same shape. `planner`: of this rank; it has
        the same limits as those of other ranks."""
        if any(w.prompt_logprobs for w in step.chunks) or step.num_logits > self._max_logits:
            return None
        sizes = ([(w.start, len(w.tokens)) for w in work.chunks] for work in step.work_by_rank)
        if not all(map(planner.can_capture_chunks, sizes)):
            return None
        work_by_rank = step.work_by_rank
        singles, chunks = (
            max(work.single_tokens for work in work_by_rank),
            max(len(work.chunks) for work in work_by_rank),
        )
        return StepShape.for_counts(singles, chunks, max(work.chunk_tokens for work in work_by_rank), grid, queries)

    def count_logits(self, shape: StepShape) -> int:
        """Return the rows of logits that a captured step of this shape computes, with padding."""
        return min(self._comm.size * shape.rows, self._max_logits)

    def stage(self, step: DividedStep, shape: StepShape | None, staged: StagedInputs) -> ExchangedRows:
        """Stage the indexes of the step's logits. `shape`: of a captured step; None: it runs uncaptured."""
        size = self._comm.size
        if shape is not None:
            rows, logit_rows = [shape.singles + shape.tokens] * size, [shape.rows] * size
            single_rows, chosen = [shape.singles] * size, np.zeros(self.count_logits(shape), np.int64)
        else:
            rows = [max(1, work.single_tokens + work.chunk_tokens) for work in step.work_by_rank]
            logit_rows = [max(1, work.num_logits) for work in step.work_by_rank]
            single_rows, chosen = (
                [work.single_tokens for work in step.work_by_rank],
                np.zeros(step.num_logits, np.int64),
            )
        offsets = [sum(logit_rows[:rank]) for rank in range(size)]
        found = step.find_logits(offsets, single_rows)
        chosen[: step.num_logits] = found
        counted = counted_logits = None
        if self._counts_rows:
            marks = np.zeros(sum(logit_rows), np.int64)
            marks[found] = 1
            counted, counted_logits = staged.put(_mark_rows(step.work_by_rank, rows, shape)), staged.put(marks)
        row_exchange = RowExchange(self._comm, tuple(rows), counted)
        logit_exchange = RowExchange(self._comm, tuple(logit_rows), counted_logits)
        return ExchangedRows(row_exchange, logit_exchange, staged.put(chosen))


def _mark_rows(work_by_rank: Sequence[RankWork], counts: Sequence[int], shape: StepShape | None) -> np.ndarray:
    """Return 1 for each row of a request and 0 for padding, for the rows of all ranks. `counts`: rows of each rank."""
    marks = [np.zeros(count, np.int64) for count in counts]
    for work, of_rank in zip(work_by_rank, marks, strict=True):
        first_chunk = work.single_tokens if shape is None else shape.singles
        of_rank[: work.single_tokens] = 1
        of_rank[first_chunk : first_chunk + work.chunk_tokens] = 1
    return np.concatenate(marks)


def fill_uncaptured(batch: DeviceBatch, rows: DeviceRows) -> DeviceBatch:
    """Return the batch of an uncaptured step, padded to one row and to one row of logits if it has none."""
    if not len(batch.tokens):
        return batch.pad_to(StepShape(1, 0, 0), rows.padding_row, rows.padding_state)
    return batch if len(batch.logit_rows) else replace(batch, logit_rows=np.zeros(1, np.int64))


def _count_chunk_logits(chunk: WorkItem) -> int:
    return len(chunk.tokens) if chunk.prompt_logprobs else int(chunk.samples)


def _place_in_order(work: Sequence[WorkItem], counts: Sequence[int], offsets: np.ndarray) -> np.ndarray:
    """Return an index for each row of the work items; those of a rank are consecutive.

    `counts`: number of rows of each work item. `offsets`: by rank, the index of its first row."""
    dp_ranks = np.repeat(np.array([w.dp_rank for w in work], np.int64), np.array(counts, np.int64))
    order, sizes = np.argsort(dp_ranks, kind="stable"), np.bincount(dp_ranks, minlength=len(offsets))
    places = np.empty(len(dp_ranks), np.int64)
    places[order] = np.arange(len(dp_ranks)) + np.repeat(offsets - (np.cumsum(sizes) - sizes), sizes)
    return places
