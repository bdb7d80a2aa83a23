"""DraftInputs: what the device needs to draft tokens after a step, for requests that want a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from emberline.core.plan import PENDING_TOKEN, WorkItem
from emberline.engine.gpu.batch import DeviceBatch
from emberline.engine.gpu.rows import DeviceRows, RequestRow
from emberline.engine.gpu.staging import StagedInputs
from emberline.kernels import ops

NO_TOKEN = 1 << 40  # differs from every token


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The requests of a step that want a draft."""

    work: list[WorkItem]
    request_rows: list[RequestRow]
    first: list[int]  # index of the first sampled token of each
    step_rows: list[int]  # index, among the step's tokens, of the token before the first sampled one
    drafts: list[Sequence[int]]  # the draft that the step verifies

    @staticmethod
    def select(singles: Sequence[WorkItem], chunks: Sequence[WorkItem], rows: DeviceRows) -> DraftRows:
        found = DraftRows([], [], [], [], [])
        end = 0
        for w in singles:
            if w.num_propose:
                found._add(w, rows, end, end)
            end += len(w.tokens)
        sampled = end
        for w in chunks:
            end += len(w.tokens)
            if w.samples:
                if w.num_propose:
                    found._add(w, rows, sampled, end - 1)
                sampled += 1
        return found

    def _add(self, work: WorkItem, rows: DeviceRows, first: int, step_row: int) -> None:
        self.work.append(work)
        self.request_rows.append(rows[work.id])
        self.first.append(first)
        self.step_rows.append(step_row)
        self.drafts.append(work.tokens[len(work.tokens) - work.num_draft :])


@dataclass(frozen=True, slots=True)
class DraftInputs:
    length: int  # tokens of the new drafts; 0: none is wanted
    computes_step: bool  # whether a model that reads tokens must compute all tokens of the step first
    numbers: Tensor  # [6, B] int64; see the properties
    drafts: Tensor  # [B, max_draft] int64: the draft; PENDING_TOKEN where only the device has it, then NO_TOKEN
    plan: ops.AttentionPlan  # of a pass with one token for each request
    pair_plan: ops.AttentionPlan | None  # of a pass with two tokens for each request
    next_tokens: Tensor | None = None  # [T] int64: the token after each token of the step; PENDING_TOKEN: sampled
    next_index: Tensor | None = None  # [T] int64: its index among the sampled tokens, if it is one of these
    step_plan: ops.AttentionPlan | None = None  # of a pass with the step's tokens; None: the target model's

    @property
    def rows(self) -> Tensor:
        """The row of each request in DeviceRows."""
        return self.numbers[0]

    @property
    def first(self) -> Tensor:
        """The index of each request's first sampled token."""
        return self.numbers[1]

    @property
    def step_rows(self) -> Tensor:
        """The index, among the step's tokens, of the token before each request's first sampled token."""
        return self.numbers[2]

    @property
    def starts(self) -> Tensor:
        """The planned position of the token at `step_rows`. The device adds the number that `shifts` finds."""
        return self.numbers[3]

    @property
    def limits(self) -> Tensor:
        """The number of positions for which each request has blocks; 0: a padding row."""
        return self.numbers[4]

    @property
    def shifts(self) -> Tensor:
        """The row in DeviceRows.accepted with the number to add to `starts`; usually a row with 0.

        The host planned the position before it knew how many drafted tokens the previous step accepts."""
        return self.numbers[5]


def stage_draft_inputs(
    found: DraftRows,
    padded: int,
    staged: StagedInputs,
    rows: DeviceRows,
    planner: ops.AttentionPlanner,
    chunks: Sequence[WorkItem],
    batch: DeviceBatch,
    num_states: int,
) -> DraftInputs:
    """Stage the inputs of drafting, padded to `padded` requests.

    `chunks`: the step's prompt chunks. `batch`: all work of the step, without padding. `num_states`: number of the
    step's tokens, with padding, if the draft model reads the target model's hidden states; otherwise 0."""
    count, put = len(found.work), staged.put
    drafts = np.full((padded, rows.max_draft), NO_TOKEN, np.int64)
    for i, draft in enumerate(found.drafts):
        drafts[i, : len(draft)] = draft
    numbers = np.zeros((6, padded), np.int64)
    numbers[0] = numbers[5] = rows.padding_row
    lengths = [w.start + len(w.tokens) for w in found.work]  # with the draft
    numbers[:, :count] = (
        [row.index for row in found.request_rows],
        found.first,
        found.step_rows,
        [end - 1 - w.num_draft for w, end in zip(found.work, lengths, strict=True)],
        [end + w.max_shift + w.num_propose for w, end in zip(found.work, lengths, strict=True)],
        [row.index if w.max_shift else rows.padding_row for w, row in zip(found.work, found.request_rows, strict=True)],
    )
    ones, longest = np.ones(padded, np.int32), (np.maximum(numbers[4], 1) - 1).astype(np.int32)
    following = map(put, _following_tokens(chunks, batch, num_states, rows)) if num_states else (None, None)
    next_tokens, next_index = following
    return DraftInputs(
        length=max((w.num_propose for w in found.work), default=0),
        # Requests that want a draft get their newest tokens computed by the first pass of the chain.
        computes_step=not num_states and (bool(chunks) or count < batch.requests),
        numbers=put(numbers),
        drafts=put(drafts),
        plan=planner.plan(longest, ones, padded, put),
        # The second token of a request attends to the first, whose key the same pass writes.
        pair_plan=None
        if num_states
        else replace(planner.plan(np.tile(longest, 2), np.tile(ones, 2), 2 * padded, put), reads_early=False),
        next_tokens=next_tokens,
        next_index=next_index,
    )


def _following_tokens(
    chunks: Sequence[WorkItem], batch: DeviceBatch, padded_tokens: int, rows: DeviceRows
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token that follows each token of a step, and its index among the sampled tokens.

    A token that the step samples is PENDING_TOKEN; for other tokens the index is 0."""
    tokens = np.zeros(padded_tokens, np.int64)
    index = np.zeros(padded_tokens, np.int64)
    singles = batch.single_tokens
    tokens[:singles], index[:singles] = PENDING_TOKEN, np.arange(singles)
    sampled = begin = singles
    for w in chunks:
        end = begin + len(w.tokens)
        tokens[begin : end - 1] = w.tokens[1:]
        if w.samples:
            tokens[end - 1], index[end - 1] = PENDING_TOKEN, sampled
            sampled += 1
        else:
            known, behind = rows[w.id].sampling.tokens, w.start + len(w.tokens)
            tokens[end - 1] = known[behind] if behind < len(known) else w.tokens[-1]
        begin = end
    return tokens, index
