"""`exact` in the GPU runner, with the CPU as device: the last token of a cached prompt is computed as a chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from host_engine import booted, plain_arithmetic

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu import runner as gpu_runner
from emberline.engine.gpu.batch import DeviceBatch
from emberline.kernels import backend


def generate(engine: Engine, name: str) -> list[int]:
    """Return the output for a prompt of one KV block and one token."""
    engine.add(Submission(name, list(range(5, 22)), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)))
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for output in engine.step() for token in output.tokens]
    return tokens


def test_single_prompt_token_is_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend", None)
    plain_arithmetic()
    tiny.write(tmp_path, tiny.config("llama"), seed=1)
    gpu_engine = booted(tmp_path)
    expected = generate(gpu_engine.engine, "whole prompt")
    chunk_sizes: list[int] = []

    class RecordingBatch(DeviceBatch):
        @staticmethod
        def split(*args):  # type: ignore[no-untyped-def]
            singles, chunks = DeviceBatch.split(*args)
            chunk_sizes.extend(len(w.tokens) for w in chunks)
            return singles, chunks

    monkeypatch.setattr(gpu_runner, "DeviceBatch", RecordingBatch)
    assert generate(gpu_engine.engine, "cached prompt") == expected and chunk_sizes == []
    gpu_engine.runner.exact = True
    assert generate(gpu_engine.engine, "exact") == expected and chunk_sizes == [1]
