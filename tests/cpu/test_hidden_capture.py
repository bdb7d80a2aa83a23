"""HiddenCapture: a forward pass copies the inputs of layers, and computes the same logits as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_families
import torch

from emberline.core.plan import WorkItem
from emberline.engine.batch import build_forward_batch
from emberline.engine.runner import allocate_cache
from emberline.models.forward import ForwardBatch, HiddenCapture
from emberline.models.loader import load_decoder


@pytest.mark.parametrize("name", ["llama", "llama-biased", "mixtral", "gemma3", "cohere2"])
@torch.inference_mode()
def test_the_inputs_of_layers_are_copied(tmp_path: Path, name: str) -> None:
    """`llama` runs as one native op, the others layer by layer."""
    from transformers import AutoModelForCausalLM

    is_llama_like = name in tiny.CONFIGS
    directory = tiny.write(tmp_path, name) if is_llama_like else tiny_families.write(tmp_path, name)
    model = load_decoder(directory, "float32")
    cache = allocate_cache(model, dtype=torch.float32, block_size=16, memory_bytes=1 << 22, max_tokens=64)
    tokens = [5, 9, 2, 77, 3, 41, 8]
    batch = build_forward_batch([WorkItem("a", 0, tokens, [1], samples=True)], cache)
    plain = model.forward(batch)
    hidden = torch.full((len(tokens) + 2, 3 * model.config.hidden), torch.nan)
    logits = model.forward(with_capture(batch, HiddenCapture((0, 1, 2), hidden)))
    assert torch.equal(logits, plain)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert torch.allclose(hidden[: len(tokens)], torch.cat([state[0] for state in states[:3]], dim=1), atol=1e-4)
    assert hidden[len(tokens) :].isnan().all()


def with_capture(batch: ForwardBatch, capture: HiddenCapture) -> ForwardBatch:
    return ForwardBatch(batch.tokens, batch.attention, batch.logit_rows, batch.keys, batch.values, capture=capture)
