"""DraftInputs: what the device needs to draft behind a step, for each request that wants a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    work: list[WorkItem]  # of the first row of each
    request_rows: list[RequestRow]
    first: list[int]  # index of the first sampled token of each
    step_rows: list[int]  # index of the token behind which that was sampled, in the step's tokens
    drafts: list[list[int]]  # the draft that the step verifies

    @staticmethod
    def select(singles: Sequence[WorkItem], chunks: Sequence[WorkItem], rows: DeviceRows) -> DraftRows:
        """`singles`: rows of one token each, in which a request's known token and its draft follow each other."""
        found = DraftRows([], [], [], [], [])
        for i, w in enumerate(singles):
            if found.work and found.work[-1].id == w.id:
                found.drafts[-1].append(w.tokens[0])
            elif w.num_propose:
                found._add(w, rows, i, i)
        sampled, end = len(singles), len(singles)
        for w in chunks:
            end += len(w.tokens)
            if w.samples:
                if w.num_propose:
                    found._add(w, rows, sampled, end - 1)
                sampled += 1
        return found

    def _add(self, work: WorkItem, rows: DeviceRows, first: int, step_row: int) -> None:
        row = rows[work.id]
        if row.draft_preemptions != work.preemptions:  # all its tokens are computed again, with the draft model
            row.draft_preemptions, row.has_draft_gap = work.preemptions, False
        if row.has_draft_gap:
            return
        self.work.append(work)
        self.request_rows.append(row)
        self.first.append(first)
        self.step_rows.append(step_row)
        self.drafts.append([])


@dataclass(frozen=True, slots=True)
class DraftInputs:
    length: int  # tokens of the new drafts; 0: none is wanted
    has_chunks: bool  # whether the step has prompt chunks
    rows: Tensor  # [B] int64: row of each request in DeviceRows
    first: Tensor  # [B] int64: index of its first sampled token
    step_rows: Tensor  # [B] int64: index of the token behind which that was sampled, in the step's tokens
    starts: Tensor  # [B] int32: position of that token
    limits: Tensor  # [B] int32: positions for which the request has blocks; 0: a padding row
    known: Tensor  # [B] int64: that token
    sampled_index: Tensor  # [B, max_draft] int64: sampled tokens that are compared with the draft
    drafts: Tensor  # [B * max_draft] int64: the draft; PENDING_TOKEN where only the device has it, then NO_TOKEN
    draft_index: Tensor  # [B * max_draft] int64: where DeviceRows.newest has it
    query_start: Tensor  # [B + 1] int32
    plan: ops.AttentionPlan  # of a pass with one token for each request
    pair_query_start: Tensor | None  # [2 B + 1] int32
    pair_plan: ops.AttentionPlan | None  # of a pass with two tokens for each request
    next_tokens: Tensor | None = None  # [T] int64: the token behind each token of the step; PENDING_TOKEN: sampled
    next_index: Tensor | None = None  # [T] int64: index of that sampled token
    step_plan: ops.AttentionPlan | None = None  # of a pass with the step's tokens; None: the target model's


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

    `chunks`, `batch`: the step's prompt chunks, and all its work, without padding. `num_states`: tokens of the step,
    with padding, whose hidden states the draft model reads; 0: it reads none."""
    count, width = len(found.work), rows.max_draft
    put = staged.put

    def pad(values: Sequence[int], dtype: type, padding: int = 0) -> np.ndarray:
        whole: np.ndarray = np.full(padded, padding, dtype)
        whole[:count] = values
        return whole

    drafts = np.full((padded, width), NO_TOKEN, np.int64)
    for i, draft in enumerate(found.drafts):
        drafts[i, : len(draft)] = draft
    at = pad([row.index for row in found.request_rows], np.int64, rows.padding_row)
    first = pad(found.first, np.int64)
    starts = pad([w.start + len(w.tokens) - 1 for w in found.work], np.int32)
    ends = [w.start + len(w.tokens) + len(d) + w.num_propose for w, d in zip(found.work, found.drafts, strict=True)]
    limits = pad(ends, np.int32)
    length = max((w.num_propose for w in found.work), default=0)
    ones = np.ones(padded, np.int32)
    longest = np.maximum(limits, 1) - 1
    pairs = not num_states and padded > 0
    following = map(put, _following_tokens(chunks, batch, num_states, rows)) if num_states else (None, None)
    next_tokens, next_index = following
    return DraftInputs(
        length=length,
        has_chunks=bool(chunks),
        rows=put(at),
        first=put(first),
        step_rows=put(pad(found.step_rows, np.int64)),
        starts=put(starts),
        limits=put(limits),
        known=put(pad([w.tokens[-1] for w in found.work], np.int64)),
        sampled_index=put(np.minimum(first[:, None] + np.arange(width), max(0, _last_index(found)))),
        drafts=put(drafts.reshape(-1)),
        draft_index=put((at[:, None] * (1 + width) + 1 + np.arange(width)).reshape(-1)),
        query_start=put(np.arange(padded + 1, dtype=np.int32)),
        plan=planner.plan(longest, ones, padded, put),
        pair_query_start=put(np.arange(2 * padded + 1, dtype=np.int32)) if pairs else None,
        pair_plan=planner.plan(np.tile(longest, 2), np.tile(ones, 2), 2 * padded, put) if pairs else None,
        next_tokens=next_tokens,
        next_index=next_index,
    )


def _last_index(found: DraftRows) -> int:
    return max((first + len(draft) for first, draft in zip(found.first, found.drafts, strict=True)), default=0)


def _following_tokens(
    chunks: Sequence[WorkItem], batch: DeviceBatch, padded_tokens: int, rows: DeviceRows
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token of a step the token behind it, or PENDING_TOKEN and the index of the sampled token."""
    tokens = np.zeros(padded_tokens, np.int64)
    index = np.zeros(padded_tokens, np.int64)
    singles = batch.singles
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
