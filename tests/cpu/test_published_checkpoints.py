"""Checkpoints as their publishers ship them, compared with transformers in float32."""

from __future__ import annotations

from pathlib import Path

import random_checkpoints
import torch
from paged_model import Cache, assert_close, prompts

from emberline.models.loader import load_decoder


def test_multimodal_llama4(tmp_path: Path) -> None:
    """The language model is loaded and the vision model is not; the rope of Scout has no interpolated frequencies."""
    theirs, tokens = random_checkpoints.write_multimodal_llama4(tmp_path), prompts(37, 20)
    with torch.inference_mode():
        expected = [theirs.language_model(torch.tensor([ids])).logits[0] for ids in tokens]
    model = load_decoder(tmp_path)
    assert model.config.model_type == "llama4_text" and model.config.windows == (16, 16, 16, 0)
    assert_close(Cache(model, tokens, 1).run(1), expected)
