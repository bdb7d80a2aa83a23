"""The arrays of a step: padding does not change the work of its requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.params import SamplingParams
from emberline.core.plan import PENDING_TOKEN, Admission, WorkItem
from emberline.engine.gpu.batch import DeviceBatch
from emberline.engine.gpu.graphs import StepGraphs
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.shape import MAX_CHUNK_TOKENS, StepShape, max_step_rows, pad_row_count
from emberline.engine.sampler import SamplingState

BLOCK = 16
CHUNKS = st.lists(st.tuples(st.integers(0, 40), st.integers(2, 50), st.booleans()), max_size=6)


def step(singles: list[int], chunks: list[tuple[int, int, bool]]) -> tuple[DeviceRows, list[WorkItem]]:
    rows = DeviceRows(64, 32, torch.device("cpu"))
    work = [WorkItem(f"s{i}", start, [PENDING_TOKEN], [], samples=True) for i, start in enumerate(singles)]
    work += [WorkItem(f"c{i}", start, [7] * n, [], samples=samples) for i, (start, n, samples) in enumerate(chunks)]
    for at, w in enumerate(work):
        params = SamplingParams()
        rows.add(w.id, SamplingState(Admission(w.id, [1], 1, params, 0), frozenset(), None))
        needed = -(-(w.start + len(w.tokens)) // BLOCK)
        w.blocks = list(range(100 * at, 100 * at + needed))
    rows.assign_rows(work)
    rows.take_block_table_updates(work)
    return rows, work


@settings(max_examples=80, deadline=None)
@given(singles=st.lists(st.integers(0, 200), max_size=40), chunks=CHUNKS)
def test_padded_batch_has_the_same_work(singles: list[int], chunks: list[tuple[int, int, bool]]) -> None:
    rows, work = step(singles, chunks)
    if not work:
        return
    alone, parts = DeviceBatch.split(work)
    plain = DeviceBatch.from_work(alone, parts, rows, BLOCK)
    shape = StepShape.for_work(len(alone), parts)
    assert shape is not None
    shaped = plain.pad_to(shape, rows.padding_row)
    assert len(shaped.rows) == shape.rows and len(shaped.tokens) == shape.singles + shape.tokens
    assert len(shaped.logit_rows) == (shape.rows if parts else shape.singles)
    begin, real = shaped.query_start, plain.query_start
    for row in range(len(work)):
        at = row if row < len(alone) else row - len(alone) + shape.singles
        assert shaped.rows[at] == plain.rows[row] and shaped.starts[at] == plain.starts[row]
        for name in ("tokens", "positions", "slots", "newest_index"):
            ours = getattr(shaped, name)[begin[at] : begin[at + 1]]
            assert np.array_equal(ours, getattr(plain, name)[real[row] : real[row + 1]]), name
    assert (shaped.slots >= 0).sum() == len(plain.tokens)
    # The used rows of logits belong to the same tokens, in the same order.
    order = shaped.slots[shaped.logit_rows[shaped.used_logit_rows]]
    assert np.array_equal(order, plain.slots[plain.logit_rows])


def test_slots_follow_the_block_table() -> None:
    rows, work = step([17], [(15, 3, True)])
    batch = DeviceBatch.from_work(*DeviceBatch.split(work), rows, BLOCK)
    assert batch.slots.tolist() == [1 * BLOCK + 1, 100 * BLOCK + 15, 101 * BLOCK, 101 * BLOCK + 1]
    assert batch.logit_rows.tolist() == [0, 3]


def test_tokens_of_chunks_follow_those_of_singles() -> None:
    rows, work = step([17], [(15, 3, True), (0, 2, False)])
    work[1].tokens = [8, 9, PENDING_TOKEN]
    assert DeviceBatch.from_work(*DeviceBatch.split(work), rows, BLOCK).tokens.tolist() == [
        PENDING_TOKEN,
        8,
        9,
        PENDING_TOKEN,
        7,
        7,
    ]


@pytest.mark.parametrize("rows", [1, 3, 9, 63, 65, 200, 300, 700, 1000])
def test_padding_is_small_and_within_the_planned_rows(rows: int) -> None:
    assert rows <= pad_row_count(rows) <= max(rows * 1.34, rows + 7)
    assert pad_row_count(rows) <= max_step_rows(rows)


def test_uncapturable_work_has_no_shape() -> None:
    long = [WorkItem("a", 0, [1] * (MAX_CHUNK_TOKENS + 1), [], samples=True)]
    scored = [WorkItem("b", 0, [1, 2], [], samples=True, prompt_logprobs=True)]
    crowd = [WorkItem(f"c{i}", 0, [1, 2], [], samples=True) for i in range(33)]
    assert (
        StepShape.for_work(0, long) is None
        and StepShape.for_work(0, scored) is None
        and StepShape.for_work(0, crowd) is None
    )


def test_row_of_absent_request_is_reused_and_its_table_sent_again() -> None:
    rows, (a, b, c) = step([16], [(0, 20, True), (0, 33, True)])
    few = DeviceRows(2, 32, torch.device("cpu"))
    for w in (a, b, c):
        few.add(w.id, rows[w.id].sampling)
    for pair in ((a, b), (b, c), (c, a), (a, b)):
        few.assign_rows(pair)
        few.take_block_table_updates(pair)
        assert len({few[w.id].index for w in pair}) == 2
        for w in pair:
            assert few.host_tables[few[w.id].index, : len(w.blocks)].tolist() == w.blocks


def test_captured_steps_share_one_logits_tensor() -> None:
    """Separate tensors for all captured steps would take more memory than planned."""
    unused: Any = None
    step_graphs = StepGraphs(unused, unused, unused, max_step_rows(200))
    few, many = (step_graphs.get_logits_buffer(rows, 10, torch.device("cpu")) for rows in (8, max_step_rows(200)))
    assert few.data_ptr() == many.data_ptr() and few.shape == (8, 10) and len(many) == max_step_rows(200)
