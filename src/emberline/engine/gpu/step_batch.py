"""build_step_batch: the forward pass of a step, from inputs that are on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from emberline.engine.gpu.graphs import StepInputs
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.state_rows import DraftColumn
from emberline.kernels import ops
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.forward import ForwardBatch, HiddenCapture


def build_step_batch(
    inputs: StepInputs,
    rows: DeviceRows,
    cache: KVCache,
    groups: LayerGroups,
    capture: HiddenCapture | None,
    states: StateCache | None = None,
    *,
    computes_all_rows: bool = False,
) -> ForwardBatch:
    """Queue the operations that prepare a forward pass, and return its batch.

    Tokens that only the device knows are filled in, and positions are moved past the accepted tokens of drafts. The
    block tables of all groups of layers are selected at once, so the time does not depend on the number of groups.
    `computes_all_rows`: see ForwardBatch."""
    tokens, slots = ops.fill_newest_tokens(inputs.tokens, inputs.newest_index, rows.newest), inputs.window_slots
    if inputs.shifts is not None:
        inputs.tokens.copy_(tokens)  # sampling overwrites `newest`, which the draft model needs
        moved = inputs.positions, inputs.slots, inputs.context, *inputs.shifts
        layout = rows.padding_row, cache.shape.block_size, slots, rows.table_width
        ops.shift_positions(ops.PositionShift(*moved, rows.accepted, rows.tables, *layout))
    tables = rows.tables.index_select(0, inputs.rows)

    def make_metadata(slots: Tensor, tables: Tensor) -> ops.AttentionMetadata:
        return ops.AttentionMetadata(
            positions=inputs.positions,
            slots=slots,
            query_start=inputs.query_start,
            context=inputs.context,
            block_tables=tables,
        )

    windows: tuple[ops.AttentionMetadata, ...] = ()
    if slots is not None:
        tables, *others = tables.split(rows.table_width, dim=1)
        each = zip(slots[:, : len(tokens)].unbind(), others, strict=True)
        windows = tuple(make_metadata(*one) for one in each)
    attention = make_metadata(inputs.slots, tables)
    recurrent = StateTensors() if states is None else _select_states(inputs, rows, states, attention)
    return ForwardBatch(
        tokens=tokens,
        attention=attention,
        logit_rows=inputs.logit_rows,
        keys=cache.keys,
        values=cache.values,
        plan=inputs.tiles.with_block_tables(),
        unpacker=inputs.weight_unpacker.begin_step(),
        capture=capture,
        window_attention=windows,
        layer_positions=() if groups.is_single else groups.layer_positions,
        conv_states=None if states is None else states.conv,
        matrix_states=None if states is None else states.matrices,
        state_slots=inputs.state_slots,
        computes_all_rows=computes_all_rows,
        **recurrent._asdict(),
        **({} if inputs.exchanged is None else inputs.exchanged.make_batch_fields(tokens)),
    )


class StateTensors(NamedTuple):
    """Fields of a ForwardBatch that only recurrent layers with drafted tokens use."""

    state_saves: ops.StateSaves | None = None
    state_drafts: ops.StateDrafts | None = None
    state_sequences: ops.AttentionMetadata | None = None


def _select_states(
    inputs: StepInputs, rows: DeviceRows, states: StateCache, attention: ops.AttentionMetadata
) -> StateTensors:
    """Queue the count of accepted drafted tokens, and return the tensors that recurrent layers need for drafts."""
    if inputs.state_drafts is None or inputs.state_starts is None:
        return StateTensors()
    columns = inputs.state_drafts.unbind()
    accepted, context = columns[DraftColumn.ACCEPTED], columns[DraftColumn.CONTEXT]
    if inputs.shifts is not None:
        accepted = accepted + rows.accepted.index_select(0, columns[DraftColumn.SHIFT]).int()
    counts, draft_slots = columns[DraftColumn.DRAFTED], columns[DraftColumn.DRAFT_SLOT]
    return StateTensors(
        ops.StateSaves(columns[DraftColumn.SAVE_SLOT], columns[DraftColumn.SAVE_AFTER]),
        ops.StateDrafts(states.draft_conv, states.draft_rule, draft_slots, accepted, counts, inputs.has_drafts),
        replace(attention, query_start=inputs.state_starts, context=context),
    )
