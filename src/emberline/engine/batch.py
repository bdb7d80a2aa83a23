"""build_forward_batch: turns the work items of a StepPlan into the model's input tensors, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.core.plan import WorkItem
from emberline.engine.step_columns import StepColumns
from emberline.kernels import ops
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.forward import ForwardBatch


def build_forward_batch(
    work: Sequence[WorkItem],
    cache: KVCache,
    groups: LayerGroups | None = None,
    states: StateCache | None = None,
    columns: StepColumns | None = None,
) -> ForwardBatch:
    """Return the model's input tensors for the work items of a step.

    `groups`: which layers share block tables; None: all share one. `states`: memory of recurrent layers, if any.
    `columns`: `start`, `tokens` and `samples` of the work items as arrays; if given, they are not read from the
    items."""
    size, columns = cache.shape.block_size, columns or StepColumns.from_work(work)
    starts, counts, samples = columns.starts, columns.counts, columns.samples.tolist()
    query_start = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])

    owner = np.repeat(np.arange(len(work)), counts)  # which request each token belongs to
    positions = np.arange(total, dtype=np.int32) - np.repeat(query_start[:-1] - starts, counts)

    def make_metadata(blocks: Sequence[Sequence[int]]) -> ops.AttentionMetadata:
        """Return the attention metadata of layers with these block tables. `blocks`: one table for each request."""
        tables = np.zeros((len(work), max(map(len, blocks), default=0)), np.int32)
        for row, table in enumerate(blocks):
            tables[row, : len(table)] = table
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        return ops.AttentionMetadata(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            query_start=torch.from_numpy(query_start),
            context=torch.from_numpy(starts),
            block_tables=torch.from_numpy(tables),
        )

    logit_rows = [
        np.arange(query_start[i] if w.prompt_logprobs else query_start[i + 1] - 1 - w.num_draft, query_start[i + 1])
        for i, w in enumerate(work)
        if samples[i] or w.prompt_logprobs
    ]
    windows = range(len(groups.windows) - 1 if groups else 0)  # not from `work`, which may be empty on a rank
    saves, drafts = (None, None) if states is None else build_state_changes(work, starts, states)
    return ForwardBatch(
        tokens=torch.from_numpy(columns.tokens.astype(np.int64)),
        attention=make_metadata([w.blocks for w in work]),
        logit_rows=torch.from_numpy(
            np.concatenate(logit_rows).astype(np.int64) if logit_rows else np.zeros(0, np.int64)
        ),
        keys=cache.keys,
        values=cache.values,
        window_attention=tuple(make_metadata([w.window_blocks[i] for w in work]) for i in windows),
        layer_positions=() if groups is None or groups.is_single else groups.layer_positions,
        conv_states=None if states is None else states.conv,
        matrix_states=None if states is None else states.matrices,
        state_slots=torch.tensor([w.state.slot for w in work if w.state is not None], dtype=torch.int32),
        state_saves=saves,
        state_drafts=drafts,
    )


def build_state_changes(
    work: Sequence[WorkItem], starts: NDArray[np.int32], states: StateCache
) -> tuple[ops.StateSaves | None, ops.StateDrafts | None]:
    """Return the copies of recurrent states to other slots in a step, and the data on its drafted tokens.

    The copies are None if the step makes none. The data is None if the step has no drafted tokens and its requests
    accepted none in their previous step. `starts`: position of each work item's first token."""
    rows = np.zeros((5, len(work)), np.int32)
    for i, w in enumerate(work):
        assert w.state is not None
        if w.state.save_to is not None:
            rows[:2, i] = w.state.save_to, w.state.save_end - starts[i] + w.state.num_accepted
        rows[2:, i] = w.state.draft_slot, w.state.num_accepted, w.num_draft
    columns = torch.from_numpy(rows)
    saves = ops.StateSaves(columns[0], columns[1]) if rows[1].any() else None
    if not rows[3:].any():
        return saves, None
    return saves, ops.StateDrafts(states.draft_conv, states.draft_rule, *columns[2:])
