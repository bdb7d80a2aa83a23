"""Gemma, Phi, OLMo, Granite, SmolLM3 and Cohere models compared with transformers in float32.

Each case is computed by both backends, whole, and in chunks and mixed batches through a paged cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_families
import torch
from paged_model import Cache, assert_close, oracle, prompts

from emberline.kernels import ops
from emberline.models.loader import load_decoder


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    before = ops.current_backend()
    yield
    ops.start_backend(native=before.library is not None)


@pytest.mark.parametrize("name", tiny_families.CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    directory = tiny_families.write(tmp_path, name)
    tokens = prompts(37, 21, 20, 50)  # the windows are shorter
    theirs = oracle(directory, tokens)
    for native in (True, False) if ops.current_backend().library is not None else (False,):
        ops.start_backend(native=native)
        model = load_decoder(directory)
        mixed = Cache(model, tokens, 1).run(1)
        assert_close(mixed, theirs)
        if native:
            whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
            assert all(torch.equal(a, b) for a, b in zip(mixed, whole, strict=True)), "depends on chunks or batch"
