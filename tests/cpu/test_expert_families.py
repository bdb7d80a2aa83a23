"""Families whose attention and experts both differ from Llama's, compared with transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_checkpoints
import torch
from paged_model import Cache, assert_close, prompts

from emberline.engine import memory
from emberline.kernels import ops
from emberline.models.loader import load_decoder


@pytest.mark.parametrize("name", random_checkpoints.CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs, tokens = random_checkpoints.write(tmp_path, name), prompts(37, 20)
    with torch.inference_mode():
        expected = [theirs(torch.tensor([ids])).logits[0] for ids in tokens]
    before = ops.current_backend()
    for native in {before.library is not None, False}:
        ops.start_backend(native=native)
        model = load_decoder(tmp_path)
        assert model.weight_bytes == memory.weight_bytes(model.config, 4)
        mixed = Cache(model, tokens, 1).run(1)
        assert_close(mixed, expected)
        if native:
            whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
            assert all(map(torch.equal, mixed, whole)), "depends on chunks or batch"
    ops.start_backend(native=before.library is not None)
