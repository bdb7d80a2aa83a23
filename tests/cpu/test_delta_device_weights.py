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
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import load_decoder
from emberline.models.sleep import iter_instances
from emberline.models.tensor_names import ignorable_tensors, load_model


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let weights be packed as for a GPU: other backends copy them, before they are loaded."""
    before = ops.current_backend()
    ops.start_backend(native=False)
    monkeypatch.setattr(ops.ReferenceBackend, "pack_linear", lambda _, w, **k: PackedWeight(w, *w.shape, w.dtype, **k))
    yield
    ops.start_backend(native=before.library is not None)


def load(directory: Path, dtype: torch.dtype, *, packed: bool = False) -> DecoderModel:
    checkpoint = Checkpoint.open(directory)
    config, weights = ModelConfig.from_checkpoint(checkpoint), DeviceWeights(checkpoint, dtype, "cpu", packed=packed)
    model = load_model(config, weights, 64)
    weights.finish(ignorable_tensors(config))
    return model


@pytest.mark.parametrize("name", ["next", "dense"])
def test_logits_do_not_depend_on_how_weights_are_loaded(name: str, tmp_path: Path) -> None:
    # Rows of gate and up are not interleaved, which only kernels for a GPU expect, if 16 does not divide their number.
    config_json = tiny_delta.make_config(name) | {"intermediate_size": 24}
    directory = tiny_delta.write_random(tmp_path, config_json, torch.bfloat16)
    tokens = prompts(20)
    expected = Cache(load_decoder(directory, "float32"), tokens).run(0)
    torch.testing.assert_close(Cache(load(directory, torch.float32), tokens).run(0), expected)


@pytest.mark.parametrize("name", ["next", "dense"])
def test_packed_matrices_have_the_order_of_plain_ones(name: str, tmp_path: Path) -> None:
    """They get their values when all of their parts have arrived."""
    directory = tiny_delta.write_random(tmp_path, tiny_delta.make_config(name), torch.bfloat16)
    plain, packed = (load(directory, torch.bfloat16, packed=each) for each in (False, True))
    for ours, theirs in zip(packed.layers, plain.layers, strict=True):
        pairs = zip(*(iter_instances(PackedWeight, each.attention) for each in (ours, theirs)), strict=True)
        assert all(torch.equal(one.data, other.data) and one.data.shape == (one.n, one.k) for one, other in pairs)
