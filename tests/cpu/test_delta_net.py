"""Qwen3-Next and Qwen3.5 models compared with transformers in float32, on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_delta
import torch
from paged_model import Cache, assert_close, prompts

from emberline.engine import memory
from emberline.kernels import ops
from emberline.models.loader import load_decoder


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    before = ops.current_backend()
    yield
    ops.start_backend(native=before.library is not None)


@pytest.mark.parametrize("name", tiny_delta.CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = tiny_delta.write(tmp_path, name)
    tokens = prompts(37, 21, 2, 70)
    theirs = tiny_delta.compute_logits(oracle, tokens)
    for native in (True, False) if ops.current_backend().library is not None else (False,):
        ops.start_backend(native=native)
        model = load_decoder(tmp_path)
        assert model.weight_bytes == memory.weight_bytes(model.config, 4)
        mixed = Cache(model, tokens, 1).run(1)
        assert_close(mixed, theirs)
        if native:
            whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
            assert all(torch.equal(a, b) for a, b in zip(mixed, whole, strict=True)), "depends on chunks or batch"
