"""Steps are captured in idle time, which changes no tokens, and again after memory has moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from on_host import booted, plain_arithmetic

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu.boot import BootedGPUEngine, rehearse
from emberline.engine.gpu.runner import GPURunner
from emberline.kernels import ops


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BootedGPUEngine:
    monkeypatch.setattr(ops, "_backend", None)
    plain_arithmetic()
    tiny.write(tmp_path, tiny.config("llama"), seed=1)
    return booted(tmp_path)


def generate(engine: Engine, name: str) -> list[int]:
    engine.add(Submission(name, list(range(5, 40)), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)))
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for output in engine.step() for token in output.tokens]
    return tokens


def prepare_all(runner: GPURunner) -> int:
    count = 0
    while runner.prepare_next():
        count += 1
    return count


def test_capturing_all_shapes_does_not_change_tokens(made: BootedGPUEngine) -> None:
    runner, engine = made.runner, made.engine
    before = generate(engine, "before")
    keys = runner.cache.keys.clone()
    assert engine.is_preparing
    assert prepare_all(runner) == len(runner.shapes) > 5
    assert not engine.is_preparing and not engine.prepare_next()
    assert set(runner.shapes) <= set(runner._graphs.captured)
    assert runner.cache.keys.equal(keys)
    assert generate(engine, "after") == before


def test_shapes_are_captured_again_after_memory_moved(made: BootedGPUEngine) -> None:
    prepare_all(made.runner)
    made.runner.forget_addresses()
    assert made.engine.is_preparing and not made.runner._graphs.captured
    assert prepare_all(made.runner) == len(made.runner.shapes)


def test_failed_capture_leaves_steps_uncaptured(made: BootedGPUEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: object) -> None:
        raise AssertionError("a buffer was allocated during a capture")

    whole = generate(made.engine, "whole")
    made.runner.forget_addresses()
    monkeypatch.setattr(made.runner._graphs.stream, "capture", fail)
    prepare_all(made.runner)
    assert made.runner._graphs.capture_failed and not made.runner._graphs.captured
    assert generate(made.engine, "again") == whole


def test_rehearsal_leaves_no_state(made: BootedGPUEngine, tmp_path: Path) -> None:
    whole = generate(booted(tmp_path).engine, "whole")
    rehearse(made.runner, made.engine.config)
    assert not made.runner._rows.by_request
    stats = made.engine.stats()
    assert (stats.step, stats.prompt_tokens, stats.blocks_cached) == (0, 0, 0)
    assert generate(made.engine, "again") == whole
