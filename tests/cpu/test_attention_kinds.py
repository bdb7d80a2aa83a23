"""Kinds of attention that Llama does not have, compared with transformers in float32 on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from paged_model import Cache, assert_close, prompts
from torch import Tensor

from emberline.core.errors import UnsupportedModel
from emberline.engine.kv_shape import make_kv_shape
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.attention_parts import AttentionParts
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.loader import compute_fingerprint
from emberline.models.tensor_names import load_model
from emberline.models.weights import Weights

CONTEXT = 64


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.current_backend()
    if request.param == "native" and before.library is None:
        pytest.skip("no native kernels")
    ops.start_backend(native=request.param == "native")
    yield request.param
    ops.start_backend(native=before.library is not None)


def check_model(model: DecoderModel, tokens: list[list[int]], theirs: list[Tensor]) -> None:
    """Check the logits, and on the native backend that their bits depend on neither chunks nor the batch."""
    mixed = Cache(model, tokens, 1).run(1)
    assert_close(mixed, theirs)
    if ops.current_backend().library is not None:
        whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
        assert all(map(torch.equal, mixed, whole)), "depends on chunks or batch"


class SinkModel:
    """A Llama with attention sinks and windows on every second layer, as gpt-oss has, but without experts."""

    def __init__(self, directory: Path) -> None:
        config = tiny.config("llama", num_hidden_layers=4, attention_bias=True)
        self.tensors = tiny.tensors(config)
        for layer in range(4):
            self.tensors[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
            self.tensors[f"model.layers.{layer}.self_attn.sinks"] = torch.randn(6, generator=torch.manual_seed(layer))
        plain = ModelConfig.from_hf(config)
        parts = replace(plain.parts, attention=AttentionParts(has_sinks=True))
        self.config = replace(plain, windows=(7, 0, 7, 0), parts=parts)
        self.checkpoint = Checkpoint.open(tiny.write_tensors(directory, config, self.tensors))

    def compute_gpt_oss_logits(self, tokens: list[list[int]]) -> list[Tensor]:
        """Return the logits of transformers' model whose experts are all zero."""
        transformers = pytest.importorskip("transformers")
        config = transformers.GptOssConfig(
            **tiny.BASE | {"num_hidden_layers": 4, "rope_theta": None},
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=7,
            rope_parameters={"rope_type": "default", "rope_theta": tiny.BASE["rope_theta"]},
            attn_implementation="eager",
        )
        model = transformers.GptOssForCausalLM(config).eval()
        state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state | {name: self.tensors[name] for name in state if name in self.tensors})
        with torch.inference_mode():
            return [model(torch.tensor([ids])).logits[0] for ids in tokens]


def test_sinks_equal_transformers(backend: str, tmp_path: Path) -> None:
    case, tokens = SinkModel(tmp_path), prompts(37, 20)
    weights = Weights(case.checkpoint, None)
    model = load_model(case.config, weights, CONTEXT)
    weights.finish("")
    assert model.stack is None
    check_model(model, tokens, case.compute_gpt_oss_logits(tokens))


def test_kinds_of_attention_change_the_fingerprint_only_where_a_model_has_them(tmp_path: Path) -> None:
    case = SinkModel(tmp_path)
    plain = replace(case.config, parts=replace(case.config.parts, attention=AttentionParts()))
    assert repr(plain) == repr(case.config) and repr(plain.parts) == repr(case.config.parts)
    with_sinks, without = (compute_fingerprint(case.checkpoint, c, "float32", 64) for c in (case.config, plain))
    assert with_sinks != without


def test_chunks_must_be_whole_blocks() -> None:
    plain = ModelConfig.from_hf(tiny.config("llama"))
    parts = replace(plain.parts, attention=AttentionParts(chunked_windows=True))
    chunked = replace(plain, windows=(48, 0, 48), parts=parts)
    assert make_kv_shape(chunked, 16, torch.float32) == make_kv_shape(plain, 16, torch.float32)
    with pytest.raises(UnsupportedModel, match=r"attention_chunk_size is 48.*block size of 32"):
        make_kv_shape(chunked, 32, torch.float32)
    assert make_kv_shape(replace(chunked, parts=plain.parts), 32, torch.float32).block_size == 32, "a sliding window"
