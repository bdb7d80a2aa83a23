"""Experts of a layer in few tensors, as a GPU has them: the values of each expert's own matrices, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import tiny_experts
import tiny_fused_experts
import torch

from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.mixture import Mixture, StackedExperts
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.moe import SparseFeedForward
from emberline.models.weights import Weights

IGNORED = r"model\.layers\.3\..*"
CASES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    name: (module, module.CONFIGS[name])
    for module, names in (
        (tiny, ("mixtral", "qwen3-moe")),
        (tiny_experts, ("glm4-groups", "qwen2-moe", "granitemoeshared")),
        (tiny_fused_experts, tiny_fused_experts.CONFIGS),
    )
    for name in names
}


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    before = ops.current_backend()
    ops.start_backend(native=False)
    yield
    ops.start_backend(native=before.library is not None)


class StackingWeights(Weights):
    stacks_experts = True


def load_mixtures(weights: Weights) -> list[Mixture]:
    model = DecoderModel.load(ModelConfig.from_checkpoint(weights.checkpoint), weights, 64, "")
    weights.finish(IGNORED)
    return [layer.ffn.mixture for layer in model.layers if isinstance(layer.ffn, SparseFeedForward)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_results_are_those_of_each_expert(name: str, tmp_path: Path) -> None:
    family, config = CASES[name]
    checkpoint = Checkpoint.open(tiny.write_tensors(tmp_path, config, family.tensors(config)))
    whole = Weights(checkpoint)
    each = load_mixtures(whole)
    packed = DeviceWeights(checkpoint, None, "cpu", packed=True)  # this backend keeps them as they are
    for weights in (StackingWeights(checkpoint), DeviceWeights(checkpoint, None, "cpu"), packed):
        stacked = load_mixtures(weights)
        assert weights.loaded_bytes == whole.loaded_bytes
        for mixture, single in zip(stacked, each, strict=True):
            assert isinstance(mixture.experts, StackedExperts) and isinstance(single.experts, tuple)
            for ours, theirs in zip(mixture.experts.split(), single.experts, strict=True):
                assert torch.equal(ours.gate_up.data, theirs.gate_up.data)
                assert torch.equal(ours.down.data, theirs.down.data)
                for mine, other in ((ours.gate_up_bias, theirs.gate_up_bias), (ours.down_bias, theirs.down_bias)):
                    assert other is None if mine is None else torch.equal(mine, other)
            if isinstance(weights, StackingWeights):  # the others pack the router before it is loaded
                x = torch.randn(9, 48)
                results = [ops.run_mixture(x.clone(), one) for one in (mixture, single)]
                torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
                assert not torch.allclose(results[0], x)
