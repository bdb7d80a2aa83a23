"""The perplexity bench: losses of a tiny model in float32, and that each format rounds the matrices of layers only."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from paged_model import Cache

from emberline.bench import perplexity
from emberline.hub.checkpoint import Checkpoint
from emberline.models.loader import load_decoder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(
        tiny.write(
            tmp_path, tiny.config("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
        )
    )


def test_losses_equal_those_of_the_logits(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has two windows, the second one shorter."""
    monkeypatch.setattr(perplexity, "WINDOW", 32)
    tokens = torch.randint(131, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = perplexity.compute_losses(perplexity.load_rounded(checkpoint, lambda values: values), tokens)
    model, expected = load_decoder(checkpoint.directory, "float32"), []
    for window in (tokens[:32], tokens[32:]):
        (logits,) = Cache(model, [window], 1).run(1)
        expected.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none"))
    assert torch.allclose(ours.float(), torch.cat(expected), atol=1e-4)


def test_each_format_rounds_the_matrices_of_layers(checkpoint: Checkpoint) -> None:
    names = {"model.layers.0.mlp.down_proj.weight": (64, 96), "lm_head.weight": (131, 64)}
    plain = perplexity.RoundedWeights(checkpoint, lambda values: values)
    for rounding in perplexity.ROUNDINGS.values():
        rounded = perplexity.RoundedWeights(checkpoint, rounding)
        for name, shape in names.items():
            ours, exact = rounded._view_tensor(name, shape), plain._view_tensor(name, shape)
            error = float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt())
            assert (0 < error < 0.2) == name.startswith("model."), name
