"""DeviceBatch: the work of a plan as numpy arrays, in the order in which the device processes it.

Each request of a step has one row, and one more for each drafted token. A single is a row with one token, a chunk is a
part of a prompt.

rows of the step    [0, singles) are singles             [singles, ...) are chunks
tokens of the step  one for each single                  then those of the chunks, one chunk after the other"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emberline.core.plan import PENDING_TOKEN, WorkItem
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.shape import StepShape


def expand_drafts(work: Sequence[WorkItem]) -> Sequence[WorkItem]:
    """Return the work with each draft as further work items of one token, directly behind that of the known token.

    All of them write their keys and values before any of them reads, so they can be in one step."""
    if not any(w.num_draft for w in work):
        return work
    expanded: list[WorkItem] = []
    for w in work:
        if not w.num_draft:
            expanded.append(w)
            continue
        assert len(w.tokens) == 1 + w.num_draft and w.samples and not w.prompt_logprobs
        for offset, token in enumerate(w.tokens):
            expanded.append(WorkItem(w.id, w.start + offset, (token,), w.blocks, True, False, w.preemptions))
    return expanded


def draft_offsets(work: Sequence[WorkItem], has_drafts: bool) -> list[int]:
    """Return the position in its draft of each expanded work item, from 1; 0: it is not drafted."""
    if not has_drafts:
        return [0] * len(work)
    offsets: list[int] = []
    previous = None
    for w in work:
        offsets.append(offsets[-1] + 1 if w.id == previous else 0)
        previous = w.id
    return offsets


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    singles: int
    rows: np.ndarray  # [B] int64: row of each request in DeviceRows
    starts: np.ndarray  # [B] int32: tokens in the cache before this step
    counts: np.ndarray  # [B] int32: tokens in this step; padding rows may have none
    tokens: np.ndarray  # [T] int64; PENDING_TOKEN where only the device has the token
    positions: np.ndarray  # [T] int32
    slots: np.ndarray  # [T] int64
    token_rows: np.ndarray  # [T] int64: row of each token's request in DeviceRows
    logit_rows: np.ndarray  # [S] int64: indexes of the tokens whose logits are computed
    used_logit_rows: np.ndarray  # int64: indexes of the rows of logits that are used, in order; the others are padding

    @staticmethod
    def split(
        work: Sequence[WorkItem], is_prompt: Callable[[WorkItem], bool] | None = None
    ) -> tuple[list[WorkItem], list[WorkItem]]:
        """Split a step's work into singles and chunks; return both lists.

        A single has one token, after which the next token is sampled. All other work items are chunks. `is_prompt`: if
        given, work items for which it returns True are chunks too, so that all tokens of a prompt use one kernel."""
        chunks = [
            w
            for w in work
            if len(w.tokens) > 1 or not w.samples or w.prompt_logprobs or (is_prompt is not None and is_prompt(w))
        ]
        if not chunks:
            return list(work), []
        chunk_objects = set(map(id, chunks))
        return [w for w in work if id(w) not in chunk_objects], chunks

    @staticmethod
    def from_work(
        singles: Sequence[WorkItem], chunks: Sequence[WorkItem], rows: DeviceRows, block_size: int
    ) -> DeviceBatch:
        work = [*singles, *chunks]
        # From lists, which takes half as long as from generators.
        index = np.array([row.index for row in rows.rows_of(work)], np.int64)
        starts = np.array([w.start for w in work], np.int32)
        counts = np.ones(len(work), np.int32)
        counts[len(singles) :] = [len(w.tokens) for w in chunks]
        total = int(counts.sum())
        ones = np.array([w.tokens[0] for w in singles], np.int64)
        tokens = np.concatenate([ones, *(_token_array(w.tokens) for w in chunks)])
        ends = np.cumsum(counts)
        positions = np.arange(total, dtype=np.int32) - np.repeat(ends - counts - starts, counts).astype(np.int32)
        token_rows = np.repeat(index, counts)
        at = token_rows * rows.host_tables.shape[1] + positions // block_size
        slots = rows.host_tables.take(at).astype(np.int64) * block_size + positions % block_size
        scored = [
            np.arange(end - len(w.tokens) if w.prompt_logprobs else end - 1, end)
            for w, end in zip(chunks, ends[len(singles) :].tolist(), strict=True)
            if w.samples or w.prompt_logprobs
        ]
        logit_rows = np.concatenate([np.arange(len(singles)), *scored]).astype(np.int64)
        wanted = np.arange(len(logit_rows))
        return DeviceBatch(
            len(singles), index, starts, counts, tokens, positions, slots, token_rows, logit_rows, wanted
        )

    def pad_to(self, shape: StepShape, padding_row: int) -> DeviceBatch:
        """Return the batch padded to the shape of a captured step.

        Padding rows are added after the singles and after the chunks, padding tokens after all other tokens. Padding
        uses the row `padding_row` of DeviceRows and writes nothing to the KV cache. In a step without chunks, each
        padding row has one token and attends to one key."""
        s, chunks, total = self.singles, len(self.rows) - self.singles, shape.singles + shape.tokens
        scored = self.logit_rows[s:]
        has_no_chunks = shape.chunks == 0

        def pad_rows(values: np.ndarray, single: int, chunk: int) -> np.ndarray:
            padded = np.full(shape.rows, chunk, values.dtype)
            padded[:s], padded[s : shape.singles] = values[:s], single
            padded[shape.singles : shape.singles + chunks] = values[s:]
            return padded

        def pad_tokens(values: np.ndarray, padding: int) -> np.ndarray:
            padded = np.full(total, padding, values.dtype)
            padded[: len(values)] = values
            return padded

        logit_rows = np.zeros(shape.rows, np.int64)
        first = shape.singles if has_no_chunks else s
        logit_rows[:first] = np.arange(first)
        logit_rows[shape.singles : shape.singles + len(scored)] = scored
        wanted = np.arange(s + len(scored))
        wanted[s:] += shape.singles - s
        return DeviceBatch(
            shape.singles,
            pad_rows(self.rows, padding_row, padding_row),
            pad_rows(self.starts, 0, 0),
            pad_rows(self.counts, int(has_no_chunks), 0),
            pad_tokens(self.tokens, 0),
            pad_tokens(self.positions, 0),
            pad_tokens(self.slots, -1),
            pad_tokens(self.token_rows, padding_row),
            logit_rows,
            wanted,
        )

    @property
    def query_start(self) -> np.ndarray:
        ends = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=ends[1:])
        return ends


def _token_array(tokens: Sequence[int]) -> np.ndarray:
    """Return the tokens as an int64 array.

    The faster way, an unsigned C array, is used only if the last token is not PENDING_TOKEN, which is negative."""
    return np.array(tokens, np.int64) if tokens[-1] == PENDING_TOKEN else np.frombuffer(array("Q", tokens), np.int64)
