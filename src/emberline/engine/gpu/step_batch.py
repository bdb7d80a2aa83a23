"""build_step_batch: the forward pass of a step, from inputs that are on the device."""

from __future__ import annotations

from torch import Tensor

from emberline.engine.gpu.graphs import StepInputs
from emberline.engine.gpu.rows import DeviceRows
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
) -> ForwardBatch:
    """Queue what prepares a forward pass, and return its batch.

    Tokens that only the device knows are filled in, and positions are moved past the accepted tokens of drafts. The
    block tables of all groups of layers are selected at once, so the time does not depend on the number of groups."""
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
    return ForwardBatch(
        tokens=tokens,
        attention=make_metadata(inputs.slots, tables),
        logit_rows=inputs.logit_rows,
        keys=cache.keys,
        values=cache.values,
        plan=inputs.tiles.with_block_tables(),
        unpacker=inputs.weight_unpacker.begin_step(),
        capture=capture,
        window_attention=windows,
        places=() if groups.is_single else groups.places,
        conv_states=None if states is None else states.conv,
        matrix_states=None if states is None else states.matrices,
        state_slots=inputs.state_slots,
    )
