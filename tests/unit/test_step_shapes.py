"""Shapes of captured steps: every captured step of large and small models has a planned shape."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.core.plan import WorkItem
from emberline.engine.gpu.shape import (
    MAX_CHUNK_TOKENS,
    ShapeGrid,
    StepShape,
    captured_shapes,
    order_by_expected_use,
)

SMOLLM2, LLAMA_8B = 106_000_000, 6_980_000_000  # weights in the layers


def work(count: int) -> WorkItem:
    return WorkItem("a", 0, [1] * count, [], samples=True)


def test_large_model_is_captured_up_to_1024_tokens() -> None:
    assert ShapeGrid.for_model(LLAMA_8B, 8192) == ShapeGrid()
    assert StepShape.for_work(0, [work(MAX_CHUNK_TOKENS + 1)], ShapeGrid.for_model(LLAMA_8B, 8192)) is None


def test_small_model_is_captured_up_to_the_whole_batch() -> None:
    grid = ShapeGrid.for_model(SMOLLM2, 8192)
    assert grid.max_tokens == 8192
    assert StepShape.for_work(3, [work(3000)], grid) == StepShape(64, 64, 3072 - 64)
    assert len(captured_shapes(256, 8192, grid)) < len(captured_shapes(256, 8192))


@given(st.sampled_from([SMOLLM2, 600_000_000, LLAMA_8B]), st.integers(1, 300), st.integers(1, 9000), st.randoms())
def test_every_captured_step_has_a_planned_shape(parameters: int, running: int, batch: int, rng: Random) -> None:
    grid = ShapeGrid.for_model(parameters, batch)
    singles = rng.randint(0, min(running, batch))
    left = min(running, batch) - singles
    chunks = [rng.randint(1, max(1, (batch - singles) // left)) for _ in range(rng.randint(0, left))]
    if not singles and not chunks:
        return
    found = StepShape.for_work(singles, [work(count) for count in chunks], grid)
    if found is not None:
        assert found in captured_shapes(running, batch, grid)
        assert found.singles >= singles and found.singles + found.tokens >= singles + sum(chunks)


@pytest.mark.parametrize("parameters", [SMOLLM2, LLAMA_8B])
def test_shapes_of_a_first_request_come_first(parameters: int) -> None:
    found = captured_shapes(256, 8192, ShapeGrid.for_model(parameters, 8192))
    order = order_by_expected_use(found)
    assert set(order) == found and len(order) == len(found)
    prompt = StepShape.for_work(0, [work(200)], ShapeGrid.for_model(parameters, 8192))
    assert {StepShape(1, 0, 0), prompt} <= set(order[:6])
