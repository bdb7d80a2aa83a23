"""DeviceBatch: the work of a plan as numpy arrays, in the order in which the device processes it.

A single is a work item of one known token and its draft, if any; a chunk is a part of a prompt. A row is what
attention treats as one sequence: a single, or a part of a single with many drafted tokens, or a chunk.

rows of the step    [0, singles) are singles             [singles, ...) are chunks
tokens of the step  those of the singles                 then those of the chunks, one after the other"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emberline.core.plan import PENDING_TOKEN, WorkItem
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.shape import StepShape
from emberline.engine.gpu.state_rows import StateRows
from emberline.kernels.worklist import split_decode_rows


def expand_drafts(work: Sequence[WorkItem]) -> Sequence[WorkItem]:
    """Return the work with an item of its own for each drafted token, directly after the item of the known token."""
    if not any(w.num_draft for w in work):
        return work
    expanded: list[WorkItem] = []
    for w in work:
        if not w.num_draft:
            expanded.append(w)
            continue
        for offset, token in enumerate(w.tokens):
            expanded.append(WorkItem(w.id, w.start + offset, (token,), w.blocks, True, False, w.preemptions))
    return expanded


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    requests: int  # without padding
    singles: int  # rows
    single_tokens: int  # tokens of these rows
    rows: np.ndarray  # [B] int64: row of each request in DeviceRows
    starts: np.ndarray  # [B] int32: tokens in the cache before those of the row
    counts: np.ndarray  # [B] int32: tokens in this step; padding rows may have none
    tokens: np.ndarray  # [T] int64; PENDING_TOKEN where only the device has the token
    positions: np.ndarray  # [T] int32
    slots: np.ndarray  # [T] int64
    newest_index: np.ndarray  # [T] int64: where DeviceRows.newest has the token, if only the device has it
    # [T] and [B] int64: row in DeviceRows.accepted by which a position and a start are shifted; usually the padding row
    token_shifts: np.ndarray
    row_shifts: np.ndarray
    max_starts: np.ndarray  # [B] int32: starts, shifted as far as possible
    logit_rows: np.ndarray  # [S] int64: indexes of the tokens whose logits are computed
    used_logit_rows: np.ndarray  # int64: indexes of the rows of logits that are used, in order; the others are padding
    # [groups, T or T + 1] int64: the slots in each group of layers with an attention window; None: there are none. Each
    # group's begin at a multiple of 16 bytes: for other addresses, Triton compiles kernels again.
    window_slots: np.ndarray | None = None
    states: StateRows | None = None  # None: the model has no recurrent layers

    @staticmethod
    def split(
        work: Sequence[WorkItem], is_prompt: Callable[[WorkItem], bool] | None = None
    ) -> tuple[list[WorkItem], list[WorkItem]]:
        """Split a step's work into singles (one known token and its draft) and chunks (parts of prompts).

        Return both lists. A single samples a token after its known token, and one after each drafted token.
        `is_prompt`: if given, work items for which it returns True are chunks too, so that all tokens of a prompt use
        one kernel."""
        chunks = [
            w
            for w in work
            if len(w.tokens) - w.num_draft > 1
            or not w.samples
            or w.prompt_logprobs
            or (is_prompt is not None and is_prompt(w))
        ]
        if not chunks:
            return list(work), []
        chunk_objects = set(map(id, chunks))
        return [w for w in work if id(w) not in chunk_objects], chunks

    @staticmethod
    def from_work(
        singles: Sequence[WorkItem],
        chunks: Sequence[WorkItem],
        rows: DeviceRows,
        block_size: int,
        *,
        max_queries: int = 1,
    ) -> DeviceBatch:
        """Return a step's batch, without padding. A single (see `split`) has a row for each `max_queries` tokens."""
        work = [*singles, *chunks]
        # From lists, which takes half as long as from generators.
        index = np.array([row.index for row in rows.rows_of(work)], np.int64)
        starts = np.array([w.start for w in work], np.int32)
        counts = np.array([len(w.tokens) for w in work], np.int32)
        total = int(counts.sum())
        num_tokens = int(counts[: len(singles)].sum())
        has_drafts = num_tokens > len(singles)
        ones = np.array(
            [token for w in singles for token in w.tokens] if has_drafts else [w.tokens[0] for w in singles], np.int64
        )
        tokens = np.concatenate([ones, *(_token_array(w.tokens) for w in chunks)])
        ends = np.cumsum(counts)
        positions = np.arange(total, dtype=np.int32) - np.repeat(ends - counts - starts, counts).astype(np.int32)
        token_rows = np.repeat(index, counts)
        at = token_rows * rows.host_tables.shape[1] + positions // block_size
        slots = rows.host_tables.take(at).astype(np.int64) * block_size + positions % block_size
        window_slots = _find_window_slots(rows, at, positions % block_size, block_size)
        scored = [
            np.arange(end - len(w.tokens) if w.prompt_logprobs else end - 1, end)
            for w, end in zip(chunks, ends[len(singles) :].tolist(), strict=True)
            if w.samples or w.prompt_logprobs
        ]
        logit_rows = np.concatenate([np.arange(num_tokens), *scored]).astype(np.int64)
        newest_index = token_rows * (1 + rows.max_draft)
        num_rows = len(singles)
        if has_drafts:
            if rows.max_draft:  # otherwise the host knows all drafted tokens, and the device has no place for them
                newest_index[:num_tokens] += positions[:num_tokens] - np.repeat(starts[:num_rows], counts[:num_rows])
            split = split_decode_rows(starts[:num_rows], counts[:num_rows], max_queries)
            index = np.concatenate([index[split.sequences], index[num_rows:]])
            starts = np.concatenate([split.context, starts[num_rows:]])
            counts = np.concatenate([split.counts, counts[num_rows:]])
            num_rows = len(split.counts)
        token_shifts, row_shifts = (np.full(size, rows.padding_row, np.int64) for size in (total, len(index)))
        max_starts = starts
        if any(w.max_shift for w in singles):
            shifts = np.array([w.max_shift for w in singles], np.int32)
            owners = np.array([row.index for row in rows.rows_of(singles)], np.int64)
            shifted = np.where(shifts > 0, owners, rows.padding_row)
            sequences = split.sequences if has_drafts else np.arange(num_rows)
            token_shifts[:num_tokens] = np.repeat(shifted, [len(w.tokens) for w in singles])
            row_shifts[:num_rows] = shifted[sequences]
            max_starts = starts.copy()
            max_starts[:num_rows] += shifts[sequences]
        wanted = np.arange(len(logit_rows))
        return DeviceBatch(
            *(len(work), num_rows, num_tokens, index, starts, counts, tokens, positions, slots, newest_index),
            *(token_shifts, row_shifts, max_starts, logit_rows, wanted, window_slots),
            states=StateRows.from_work(singles, chunks, num_rows, rows),
        )

    def pad_to(self, shape: StepShape, padding_row: int, padding_state: int | None = None) -> DeviceBatch:
        """Return the batch padded to the shape of a captured step. `padding_state`: see DeviceRows.

        Padding rows are added after the singles and after the chunks, padding tokens after all other tokens. Padding
        uses the row `padding_row` of DeviceRows and writes nothing to the KV cache. In a step without chunks and
        drafts, each padding row has one token and attends to one key; in other steps, it has none."""
        s, chunks, total = self.singles, len(self.rows) - self.singles, shape.singles + shape.tokens
        count, states = self.single_tokens, self.states
        scored = self.logit_rows[count:]
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

        window_slots = None
        if self.window_slots is not None:
            window_slots = np.full((len(self.window_slots), total + total % 2), -1, np.int64)
            window_slots[:, : len(self.tokens)] = self.window_slots[:, : len(self.tokens)]
        logit_rows = np.zeros(shape.rows, np.int64)
        first = shape.singles if has_no_chunks else count
        logit_rows[:first] = np.arange(first)
        logit_rows[shape.singles : shape.singles + len(scored)] = scored
        wanted = np.arange(count + len(scored))
        wanted[count:] += shape.singles - count
        return DeviceBatch(
            self.requests,
            shape.singles,
            count,
            pad_rows(self.rows, padding_row, padding_row),
            pad_rows(self.starts, 0, 0),
            pad_rows(self.counts, int(has_no_chunks and shape.queries == 1), 0),
            pad_tokens(self.tokens, 0),
            pad_tokens(self.positions, 0),
            pad_tokens(self.slots, -1),
            pad_tokens(self.newest_index, 0),
            pad_tokens(self.token_shifts, padding_row),
            pad_rows(self.row_shifts, padding_row, padding_row),
            pad_rows(self.max_starts, 0, 0),
            logit_rows,
            wanted,
            window_slots,
            None if states is None or padding_state is None else states.pad(pad_rows, padding_state, padding_row),
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


def _find_window_slots(rows: DeviceRows, at: np.ndarray, offsets: np.ndarray, block_size: int) -> np.ndarray | None:
    """Return each token's slot in each group of layers with a window; None: there are no such groups.

    `at`: where `rows.host_tables`, flattened, has each token's block in its first table. `offsets`: each token's index
    within its block."""
    if rows.num_tables == 1:
        return None
    slots = np.full((rows.num_tables - 1, len(at) + len(at) % 2), -1, np.int64)
    for table, found in enumerate(slots, 1):
        found[: len(at)] = rows.host_tables.take(at + table * rows.table_width).astype(np.int64) * block_size + offsets
    return slots
