"""DeviceRows: the block tables and the newest token of each request, kept on the device.

Each running request has a row. A preempted request keeps its row until a different request needs it. By then the host
has read all tokens of the preempted request, so nothing is lost. The last row is for padding of captured steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from emberline.core.plan import WorkItem
from emberline.engine.sampler import SamplingState
from emberline.kv.cache import StateCache


class HostDrafts:
    """Drafts of the requests of a step, which are copied from the device. Read them after the copy has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @cached_property
    def values(self) -> list[list[int]]:
        return cast("list[list[int]]", self._tensor.tolist())


@dataclass(slots=True)
class RequestRow:
    """A request's row on the device, and how much of its block tables the device has."""

    index: int  # -1: it has no row
    sampling: SamplingState
    is_plain: bool  # copied from `sampling` for speed
    num_blocks: int = 0  # blocks of its table that the device has
    num_window_blocks: int = 0  # of each of its tables for layers with an attention window
    preemptions: int = 0  # preemptions of the request when these blocks were sent
    has_counts: bool = False  # whether the device has its token counts, for penalties
    drafts: tuple[HostDrafts, int] | None = None  # the newest draft of the draft model, and its index


class DeviceRows:
    def __init__(
        self,
        capacity: int,
        width: int,
        device: torch.device,
        max_draft: int = 0,
        num_tables: int = 1,
        states: StateCache | None = None,
    ) -> None:
        """`width`: maximum blocks in a block table. `max_draft`: maximum tokens that a draft model proposes.

        `num_tables`: block tables of a request, one for each group of layers. `states`: recurrent states, if any."""
        self.max_draft = max_draft
        self.padding_row = capacity
        # The slot with the recurrent states of padding, and whether the rows of drafted tokens are kept.
        self.padding_state = None if states is None else states.padding_slot
        self.keeps_drafted_rows = states is not None and states.max_draft > 0
        self.num_tables = num_tables
        # Tables after the first begin at a multiple of 16 bytes: for other addresses, Triton compiles kernels again.
        self.table_width = width if num_tables == 1 else -(-width // 4) * 4
        width = num_tables * self.table_width
        # The block tables of each row, side by side.
        self.tables = torch.zeros(capacity + 1, width, dtype=torch.int32, device=device)
        # For each row its newest token, then its draft.
        self.newest = torch.zeros((capacity + 1) * (1 + max_draft), dtype=torch.int64, device=device)
        # For each row, how many tokens of its newest draft were accepted; always 0 for the padding row.
        self.accepted = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self.host_tables = np.zeros((capacity + 1, width), np.int32)  # the tables with all updates that will be sent
        self.temperature = np.zeros(capacity + 1, np.float32)
        self.top_k = np.zeros(capacity + 1, np.int32)
        self.top_p = np.ones(capacity + 1, np.float32)
        self.min_p = np.zeros(capacity + 1, np.float32)
        self.seed = np.zeros(capacity + 1, np.int64)
        self._free = list(reversed(range(capacity)))
        self.by_request: dict[str, RequestRow] = {}  # by request id; only this class changes it

    @property
    def first_tables(self) -> torch.Tensor:
        """The block tables of the first group of layers, which keeps all blocks."""
        return self.tables if self.num_tables == 1 else self.tables[:, : self.table_width]

    def device_buffers(self) -> list[torch.Tensor]:
        return [self.tables, self.newest, self.accepted]

    def store_drafts(self, indexes: torch.Tensor, accepted: torch.Tensor, drafts: torch.Tensor) -> None:
        """Queue the storing of drafts in these rows.

        `accepted` [B]: how many tokens of the previous draft were accepted. `drafts` [B, 1 + length]: the newest token
        of each request, then its draft."""
        newest = self.newest.view(-1, 1 + self.max_draft)
        newest[:, : drafts.shape[1]].index_copy_(0, indexes, drafts)
        self.accepted.index_copy_(0, indexes, accepted)

    def __getitem__(self, request_id: str) -> RequestRow:
        return self.by_request[request_id]

    def rows_of(self, work: Sequence[WorkItem]) -> list[RequestRow]:
        """Return the row of each request in a step."""
        rows = self.by_request
        return [rows[w.id] for w in work]

    def filter_admitted(self, work: Sequence[WorkItem]) -> list[WorkItem]:
        """Return the work items of requests that were added and have not been removed."""
        rows = self.by_request
        return [w for w in work if w.id in rows]

    def get(self, request_id: str) -> RequestRow | None:
        return self.by_request.get(request_id)

    def is_prompt(self, work: WorkItem) -> bool:
        """Return whether the first token of a work item belongs to the prompt of its request."""
        return work.start < self.by_request[work.id].sampling.prompt_len

    def forced_tokens(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Return the tokens that grammars force next, by request id. Requests without any are left out."""
        special = ((i, row.sampling) for i in request_ids if not (row := self.by_request[i]).is_plain)
        return {i: tokens for i, sampling in special if (tokens := sampling.forced_tokens())}

    def add(self, request_id: str, sampling: SamplingState) -> None:
        assert request_id not in self.by_request
        self.by_request[request_id] = RequestRow(-1, sampling, sampling.is_plain)

    def remove(self, request_id: str) -> None:
        row = self.by_request.pop(request_id, None)
        if row is not None and row.index >= 0:
            self._free.append(row.index)

    def assign_rows(self, work: Sequence[WorkItem]) -> None:
        """Give each request of a step a row. If too few are free, take rows of requests outside the step."""
        missing = [row for row in self.rows_of(work) if row.index < 0]
        if len(missing) > len(self._free):
            in_step = {w.id for w in work}
            for name, row in self.by_request.items():
                if row.index >= 0 and name not in in_step:
                    self._free.append(row.index)
                    row.index = -1
        for row in missing:
            self._assign_row(row, self._free.pop())

    def _assign_row(self, row: RequestRow, index: int) -> None:
        row.index, row.num_blocks, row.num_window_blocks = index, 0, 0
        row.has_counts, row.drafts = False, None
        p = row.sampling.params
        self.temperature[index], self.top_k[index] = p.temperature, min(p.top_k, (1 << 31) - 1)
        self.top_p[index], self.min_p[index] = p.top_p, p.min_p
        self.seed[index] = np.uint64(row.sampling.seed % (1 << 64)).astype(np.int64)

    def take_block_table_updates(self, work: Sequence[WorkItem]) -> tuple[np.ndarray, np.ndarray]:
        """Return the block table entries to send: indexes in the device's flattened tables, and block ids."""
        width = self.host_tables.shape[1]
        indexes: list[np.ndarray] = []
        blocks: list[int] = []
        for w, row in zip(work, self.rows_of(work), strict=True):
            if row.preemptions != w.preemptions:
                row.preemptions, row.num_blocks, row.num_window_blocks = w.preemptions, 0, 0
            if w.window_blocks:
                self._take_window_updates(w, row, indexes, blocks)
            if row.num_blocks == len(w.blocks):
                continue
            start, end = row.num_blocks, len(w.blocks)
            new = w.blocks[start:end]
            self.host_tables[row.index, start:end] = new
            indexes.append(np.arange(row.index * width + start, row.index * width + end))
            blocks.extend(new)
            row.num_blocks = end
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(indexes), np.array(blocks, np.int32)

    def _take_window_updates(
        self, work: WorkItem, row: RequestRow, indexes: list[np.ndarray], blocks: list[int]
    ) -> None:
        """Append the new entries of a request's block tables for layers with a window. These tables have equal lengths.

        Released blocks stay in the device's tables: no token that is computed from now on attends to them."""
        start, end = row.num_window_blocks, len(work.window_blocks[0])
        if start == end:
            return
        first = row.index * self.host_tables.shape[1]
        for table, found in enumerate(work.window_blocks, 1):
            at, new = table * self.table_width, found[start:end]
            self.host_tables[row.index, at + start : at + end] = new
            indexes.append(np.arange(first + at + start, first + at + end))
            blocks.extend(new)
        row.num_window_blocks = end
