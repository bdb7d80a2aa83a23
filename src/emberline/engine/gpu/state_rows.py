"""StateRows: which recurrent states the rows of a step read and write, as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from emberline.core.plan import StateWork, WorkItem
from emberline.engine.gpu.rows import DeviceRows

PadRows = Callable[[np.ndarray, int, int], np.ndarray]  # of DeviceBatch.pad_to: values, padding of singles, of chunks


class DraftColumn(IntEnum):
    """The rows of `StateRows.drafts`, each of which has one of these values for every sequence of a step."""

    CONTEXT = 0  # tokens before those of the step; only whether there are any matters
    COUNT = 1  # tokens in the step
    DRAFT_SLOT = 2  # where the rows of its drafted tokens are kept
    ACCEPTED = 3  # drafted tokens of the previous step over which its states first advance
    SHIFT = 4  # row in DeviceRows.accepted with the number of further ones, which only the device knows
    DRAFTED = 5  # drafted tokens of this step
    SAVE_SLOT = 6  # slot to which its states are copied
    SAVE_AFTER = 7  # accepted and new tokens after which that is done; 0: there is no copy


@dataclass(frozen=True, slots=True)
class StateRows:
    """The slots with the recurrent states of a step's sequences: decoding requests, then prompt chunks.

    Attention may cut a request with many drafted tokens into several rows. Recurrent layers must compute them as one
    sequence, so here the request has one row. Empty rows follow the last decoding request, so that there are as many
    rows as in attention."""

    slots: np.ndarray  # [B] int32: slot with the states
    drafts: np.ndarray | None = None  # [DraftColumn, B] int32; None: no tokens are drafted

    @staticmethod
    def from_work(
        singles: Sequence[WorkItem], chunks: Sequence[WorkItem], num_single_rows: int, rows: DeviceRows
    ) -> StateRows | None:
        """Return the StateRows of a step; None if the model has no recurrent layers.

        `num_single_rows`: rows of decoding requests in attention. Test requests, which have no slot, use the padding
        slot."""
        if (padding := rows.padding_state) is None:
            return None
        slots = np.full(num_single_rows + len(chunks), padding, np.int32)
        places = [*range(len(singles)), *range(num_single_rows, len(slots))]
        work = [*singles, *chunks]
        slots[places] = [padding if w.state is None else w.state.slot for w in work]
        if not rows.keeps_drafted_rows:
            assert not any(w.num_draft for w in work), "drafts need EngineConfig.speculation"
            return StateRows(slots)
        assert not any(w.num_draft or (w.state and w.state.num_accepted) for w in chunks), "a chunk has a draft"
        drafts = np.zeros((len(DraftColumn), len(slots)), np.int32)
        drafts[DraftColumn.SHIFT] = rows.padding_row
        found = [_list_columns(w, row.index if w.max_shift else rows.padding_row)
                 for w, row in zip(work, rows.rows_of(work), strict=True)]  # fmt: skip
        if found:
            drafts[:, places] = np.array(found, np.int32).T
        drafts[DraftColumn.SAVE_AFTER, num_single_rows:] = 0  # states of chunks are copied after the step
        return StateRows(slots, drafts)

    def pad(self, pad_rows: PadRows, padding_state: int, padding_row: int) -> StateRows:
        slots = pad_rows(self.slots, padding_state, padding_state)
        if self.drafts is None:
            return StateRows(slots)
        padding = [padding_row if column is DraftColumn.SHIFT else 0 for column in DraftColumn]
        columns = [pad_rows(values, value, value) for values, value in zip(self.drafts, padding, strict=True)]
        return StateRows(slots, np.stack(columns))

    @property
    def query_start(self) -> np.ndarray:
        """The index of each sequence's first token among those of the step, then the number of all tokens."""
        assert self.drafts is not None
        ends = np.zeros(len(self.slots) + 1, np.int32)
        np.cumsum(self.drafts[DraftColumn.COUNT], out=ends[1:])
        return ends


def _list_columns(work: WorkItem, shift_row: int) -> tuple[int, ...]:
    """Return the values of a work item for `StateRows.drafts`, in the order of DraftColumn."""
    state = work.state or StateWork(0)
    slot, after = 0, 0
    if state.save_to is not None:
        slot, after = state.save_to, state.save_end - work.start + state.num_accepted
    counts = work.start, len(work.tokens)
    return *counts, state.draft_slot, state.num_accepted, shift_row, work.num_draft, slot, after
