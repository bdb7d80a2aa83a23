"""Weights of recurrent layers that are loaded as for a GPU: rows are reordered, and rates computed, after loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_delta
import torch
from paged_model import Cache, prompts

from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.packed_weight import PackedWeight
from emberline.models.config import ModelConfig
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import load_decoder
from emberline.models.tensor_names import ignorable_tensors, load_model


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let weights be packed as for a GPU: other backends copy them, before they are loaded."""
    before = ops.current_backend()
    ops.start_backend(native=False)
    monkeypatch.setattr(ops.ReferenceBackend, "pack_linear", lambda _, w, **k: PackedWeight(w, *w.shape, w.dtype, **k))
    yield
    ops.start_backend(native=before.library is not None)


@pytest.mark.parametrize(("name", "packed"), [("next", False), ("dense", False), ("next", True), ("dense", True)])
def test_logits_do_not_depend_on_how_weights_are_loaded(
    name: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `packed`, matrices get their values, in another order, when all of their parts have arrived."""
    if packed:  # not before they are loaded, so that any backend can pack them
        monkeypatch.undo()
    # Rows of gate and up are not interleaved, which only kernels for a GPU expect, if 16 does not divide their number.
    config_json = tiny_delta.make_config(name) | {"intermediate_size": 24}
    directory = tiny_delta.write_random(tmp_path, config_json, torch.bfloat16)
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_checkpoint(checkpoint)
    dtype = "bfloat16" if packed else "float32"
    weights = DeviceWeights(checkpoint, getattr(torch, dtype), "cpu", packed=packed)
    model = load_model(config, weights, 64)
    weights.finish(ignorable_tensors(config))
    tokens = prompts(20)
    expected = Cache(load_decoder(directory, dtype), tokens).run(0)
    torch.testing.assert_close(Cache(model, tokens).run(0), expected)
