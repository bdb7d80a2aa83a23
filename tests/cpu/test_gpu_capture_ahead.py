"""Steps are captured in idle time, which changes no tokens, and again after memory has moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from host_engine import booted, plain_arithmetic

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu.boot import BootedGPUEngine, run_test_request
from emberline.engine.gpu.runner import GPURunner
from emberline.kernels import backend


@pytest.fixture
def gpu_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BootedGPUEngine:
    monkeypatch.setattr(backend, "_backend", None)
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


def test_capturing_all_shapes_does_not_change_tokens(gpu_engine: BootedGPUEngine) -> None:
    runner, engine = gpu_engine.runner, gpu_engine.engine
    before = generate(engine, "before")
    keys = runner.cache.keys.clone()
    assert engine.is_preparing
    assert prepare_all(runner) == len(runner.shapes) > 5
    assert not engine.is_preparing and not engine.prepare_next()
    assert set(runner.shapes) <= set(runner._graphs.captured)
    assert runner.cache.keys.equal(keys)
    assert generate(engine, "after") == before


def test_shapes_are_captured_again_after_memory_moved(gpu_engine: BootedGPUEngine) -> None:
    prepare_all(gpu_engine.runner)
    gpu_engine.runner.drop_device_addresses()
    assert gpu_engine.engine.is_preparing and not gpu_engine.runner._graphs.captured
    assert prepare_all(gpu_engine.runner) == len(gpu_engine.runner.shapes)


def test_failed_capture_leaves_steps_uncaptured(gpu_engine: BootedGPUEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: object) -> None:
        raise AssertionError("a buffer was allocated during a capture")

    whole = generate(gpu_engine.engine, "whole")
    gpu_engine.runner.drop_device_addresses()
    monkeypatch.setattr(gpu_engine.runner._graphs.stream, "capture", fail)
    prepare_all(gpu_engine.runner)
    assert gpu_engine.runner._graphs.capture_failed and not gpu_engine.runner._graphs.captured
    assert generate(gpu_engine.engine, "again") == whole


def test_rehearsal_leaves_no_state(gpu_engine: BootedGPUEngine, tmp_path: Path) -> None:
    whole = generate(booted(tmp_path).engine, "whole")
    run_test_request(gpu_engine.runner, gpu_engine.engine.config)
    assert not gpu_engine.runner._rows.by_request
    stats = gpu_engine.engine.stats()
    assert (stats.step, stats.prompt_tokens, stats.blocks_cached) == (0, 0, 0)
    assert generate(gpu_engine.engine, "again") == whole
