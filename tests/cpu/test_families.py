"""Gemma, Phi, OLMo, Granite, SmolLM3, Cohere and Llama 4 models compared with transformers in float32.

Each case is computed by both backends, whole, and in chunks and mixed batches through a paged cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import tiny_families
import torch
from paged_model import Cache, assert_close, oracle, prompts

from emberline.engine import memory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.loader import load_decoder
from emberline.models.weight_dtype import stored_weight_dtype


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
    stored = sum(tensor.nbytes for tensor in tiny_families.tensors(tiny_families.CONFIGS[name]).values())
    for native in (True, False) if ops.current_backend().library is not None else (False,):
        ops.start_backend(native=native)
        model = load_decoder(directory)
        assert model.weight_bytes == memory.weight_bytes(model.config, 4) == stored
        mixed = Cache(model, tokens, 1).run(1)
        assert_close(mixed, theirs)
        if native:
            whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
            assert all(torch.equal(a, b) for a, b in zip(mixed, whole, strict=True)), "depends on chunks or batch"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_part_of_a_multimodal_checkpoint(prefix: str, tmp_path: Path) -> None:
    """The config has only fields that differ from the defaults; tensors of the vision tower are not loaded."""
    text = tiny_families.CONFIGS["gemma3"] | {"tie_word_embeddings": prefix.startswith("model")}
    tensors = tiny_families.tensors(text)
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if "lm_head.weight" in renamed:
        renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    renamed["vision_tower.vision_model.embeddings.patch_embedding.bias"] = torch.ones(3)
    renamed["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    outer |= {"vision_config": {"hidden_size": 9}, "eos_token_id": [1, 106], "mm_tokens_per_image": 256}
    both = load_decoder(tiny.write_tensors(tmp_path / "both", outer, renamed))
    alone = load_decoder(tiny.write_tensors(tmp_path / "text", text, tensors))
    tokens = prompts(20)
    assert torch.equal(Cache(both, tokens).step([20]), Cache(alone, tokens).step([20]))
    assert both.config.eos == (1, 106) and both.weight_bytes == alone.weight_bytes
    assert stored_weight_dtype(Checkpoint.open(tmp_path / "both")) == "float32"


def test_embedding_multiplier_is_rounded_as_the_weights(tmp_path: Path) -> None:
    """Gemma was trained with the square root of its width in bfloat16; transformers rounds it to the weights' dtype."""
    directory = tiny_families.write(tmp_path, "gemma3")
    assert load_decoder(directory).embedding_multiplier == pytest.approx(48**0.5, rel=1e-7)
    assert load_decoder(directory, "bfloat16").embedding_multiplier == 6.9375
