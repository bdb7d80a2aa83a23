"""The planned memory of a head for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mtp_head import add_tensors, head_tensors
from safetensors.torch import load_file
from test_mtp import write_base

from emberline.core.engine_config import EngineConfig, SpeculationConfig
from emberline.engine.draft_estimate import estimate_draft_memory
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.draft_boot import load_on_device, measure_draft_model
from emberline.hub.checkpoint import Checkpoint
from emberline.models.loader import load_decoder


@pytest.mark.parametrize("has_embedding", [False, True])
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("has_copies", [False, True])
def test_planned_memory_is_that_of_a_loaded_head(
    has_embedding: bool, has_head: bool, has_copies: bool, tmp_path: Path
) -> None:
    """`has_copies`: matrices that are not the head's own are copies of the model's, instead of missing."""
    config = write_base(tmp_path, "dense glm")
    tensors, model_tensors = head_tensors(config), load_file(tmp_path / "model.safetensors")
    at = f"model.layers.{config['num_hidden_layers']}"
    for is_own, name, original in (
        (has_embedding, "embed_tokens", "model.embed_tokens"),
        (has_head, "shared_head.head", "lm_head"),
    ):
        if not is_own:
            del tensors[f"{at}.{name}.weight"]
        if not is_own and has_copies:
            tensors[f"{at}.{name}.weight"] = model_tensors[f"{original}.weight"].clone()
    add_tensors(tmp_path, tensors)
    model = load_decoder(tmp_path, "float32")
    loaded = load_on_device(SpeculationConfig("mtp"), model, tmp_path, HostDevice())
    settings = EngineConfig.build(str(tmp_path), dtype="float32", speculate="mtp")
    planned = estimate_draft_memory(settings, Checkpoint.open(tmp_path), model.config, "float32")
    assert planned == replace(measure_draft_model(loaded), weight_bytes=planned.weight_bytes)
    assert planned.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.01)
