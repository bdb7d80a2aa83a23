"""Models with experts compared with transformers in float32, and experts of other families with its modules.

Each case is computed by both backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import tiny_experts
import torch
from paged_model import Cache, assert_close, oracle, prompts

from emberline.core.errors import ModelFileError
from emberline.engine import memory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.reference import rms_norm
from emberline.models import experts_spec
from emberline.models.config import ModelConfig
from emberline.models.experts_spec import ExpertsSpec
from emberline.models.expertsconfig import ExpertsConfig
from emberline.models.fields import ConfigFields
from emberline.models.loader import load_decoder
from emberline.models.moe import SparseFeedForward
from emberline.models.registry import ARCHITECTURES
from emberline.models.weights import Weights


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    before = ops.current_backend()
    yield
    ops.start_backend(native=before.library is not None)


def backends() -> tuple[bool, ...]:
    return (True, False) if ops.current_backend().library is not None else (False,)


@pytest.mark.parametrize("name", tiny_experts.CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    config = tiny_experts.CONFIGS[name]
    directory = tiny_experts.write(tmp_path, config)
    tokens = prompts(37, 21, 20)
    theirs = oracle(directory, tokens)
    stored = sum(tensor.nbytes for tensor in tiny_experts.tensors(config).values())
    for native in backends():
        ops.start_backend(native=native)
        model = load_decoder(directory)
        assert model.weight_bytes == memory.weight_bytes(model.config, 4) == stored
        mixed = Cache(model, tokens, 1).run(1)
        assert_close(mixed, theirs)
        if native:
            whole = [Cache(model, [ids]).step([len(ids)]) for ids in tokens]
            assert all(torch.equal(a, b) for a, b in zip(mixed, whole, strict=True)), "depends on chunks or batch"


def test_layers_for_multi_token_prediction_are_not_loaded(tmp_path: Path) -> None:
    config = tiny_experts.CONFIGS["glm4"]
    tensors, tokens = tiny_experts.tensors(config), prompts(20)
    without = load_decoder(tiny.write_tensors(tmp_path / "without", config, tensors))
    known = tensors | tiny_experts.mtp_layer(config, 3)
    model = load_decoder(tiny.write_tensors(tmp_path / "known", config, known))
    assert torch.equal(Cache(model, tokens).step([20]), Cache(without, tokens).step([20]))
    assert model.weight_bytes == without.weight_bytes
    for fields, message in (({}, r"layers\.4\."), ({"num_nextn_predict_layers": 0}, r"layers\.3\.")):
        directory = tiny.write_tensors(tmp_path / "more", config | fields, known | tiny_experts.mtp_layer(config, 4))
        with pytest.raises(ModelFileError, match=f"does not use.*{message}"):
            load_decoder(directory)


def test_options_of_experts_are_in_the_fingerprint(tmp_path: Path) -> None:
    config = tiny_experts.CONFIGS["glm4-groups"]
    changes: list[dict[str, Any]] = [{}, {"routed_scaling_factor": 2.0}, {"topk_group": 3}]
    directories = [tiny_experts.write(tmp_path / str(i), config | change) for i, change in enumerate(changes)]
    assert len({load_decoder(directory).fingerprint for directory in directories}) == 3


@pytest.mark.parametrize("name", ["glm4", "granitemoeshared", "qwen2-moe-mixed"])
def test_missing_tensors_are_listed(name: str, tmp_path: Path) -> None:
    config = tiny_experts.CONFIGS[name]
    tensors, left = tiny_experts.tensors(config), "model.layers.0.input_layernorm.weight"
    directory = tiny.write_tensors(tmp_path, config, {left: tensors[left]})
    with pytest.raises(ModelFileError, match=rf"requires \({len(tensors) - 1}\): ") as raised:
        load_decoder(directory)
    assert "unused" not in raised.value.message


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "glm4", "qwen2-moe"])
def test_all_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    """The names and the order of transformers 5; the values are the same to the bit, and transformers reads them."""
    family = tiny_experts if name in tiny_experts.CONFIGS else tiny
    config = family.CONFIGS[name]
    tensors, tokens = family.tensors(config), prompts(20)
    each = load_decoder(tiny.write_tensors(tmp_path / "each", config, tensors))
    fused = load_decoder(tiny.write_tensors(tmp_path / "fused", config, tiny_experts.fuse(tensors)))
    logits = Cache(fused, tokens).step([20])
    assert torch.equal(logits, Cache(each, tokens).step([20])) and fused.weight_bytes == each.weight_bytes
    assert_close([logits], oracle(tmp_path / "fused", tokens))


class ExpertPart(NamedTuple):
    """A network of a family whose attention is not supported yet."""

    spec: ExpertsSpec
    family: str  # of transformers
    names: tuple[str, str]  # of the module of transformers and of its config
    module: str  # in a layer
    fields: dict[str, Any]


SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_experts_per_tok": 2, "num_attention_heads": 4}
ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 40, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
V2, V3 = ("DeepseekV2Moe", "DeepseekV2Config"), ("DeepseekV3MoE", "DeepseekV3Config")
LLAMA4, GPT_OSS = ("Llama4TextMoe", "Llama4TextConfig"), ("GptOssMLP", "GptOssConfig")
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
PARTS = {
    "llama4": ExpertPart(experts_spec.LLAMA4, "llama4", LLAMA4, "feed_forward", {"num_local_experts": 5}),
    "llama4-one": ExpertPart(
        experts_spec.LLAMA4, "llama4", LLAMA4, "feed_forward", {"num_local_experts": 5, "num_experts_per_tok": 1}
    ),
    "gpt-oss": ExpertPart(experts_spec.GPT_OSS, "gpt_oss", GPT_OSS, "mlp", {"num_local_experts": 5}),
    "gpt-oss-limit": ExpertPart(
        experts_spec.GPT_OSS, "gpt_oss", GPT_OSS, "mlp", {"num_local_experts": 5, "swiglu_limit": 0.5}
    ),
    "deepseek-v2-lite": ExpertPart(
        experts_spec.DEEPSEEK_V2, "deepseek_v2", V2, "mlp", ROUTED | {"topk_method": "greedy"}
    ),
    "deepseek-v2": ExpertPart(
        experts_spec.DEEPSEEK_V2, "deepseek_v2", V2, "mlp", ROUTED | GROUPS | {"topk_method": "group_limited_greedy"}
    ),
    "deepseek-v3": ExpertPart(
        experts_spec.DEEPSEEK_V3, "deepseek_v3", V3, "mlp", ROUTED | GROUPS | {"norm_topk_prob": True}
    ),
    "kimi-k2": ExpertPart(
        experts_spec.DEEPSEEK_V3,
        "deepseek_v3",
        V3,
        "mlp",
        ROUTED | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_experts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    spec, family, (class_name, config_name), at, changes = PARTS[name]
    fields = {**SIZES, **changes}
    transformers = pytest.importorskip("transformers")
    theirs = getattr(__import__(f"transformers.models.{family}.modeling_{family}", fromlist=[""]), class_name)
    torch.manual_seed(0)
    module = theirs(getattr(transformers, config_name)(**fields, pad_token_id=0)).eval()
    values = {key: torch.randn(value.shape) / value.shape[-1] ** 0.5 * 2 for key, value in module.state_dict().items()}
    module.load_state_dict(values)
    norm = 1 + 0.2 * torch.randn(48)
    tensors = {f"model.layers.0.{at}.{key}": value for key, value in values.items()}
    tensors["model.layers.0.post_attention_layernorm.weight"] = norm
    directory = tiny.write_tensors(tmp_path, tiny.config("llama"), tensors)
    model_type = "llama4_text" if family == "llama4" else family
    filled = ARCHITECTURES[model_type].fill_defaults(fields)
    read = ExpertsConfig.from_hf(ConfigFields(filled, "config.json"), spec, 1)
    config = replace(ModelConfig.from_hf(tiny.config("llama")), experts=read)
    x = torch.randn(23, 48)
    with torch.no_grad():
        expected = module(rms_norm(x, norm, config.norm_eps)[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected).view(23, 48)
    for native in backends():
        ops.start_backend(native=native)
        weights = Weights(Checkpoint.open(directory))
        ours = SparseFeedForward.load_from(config, spec, weights, "model.layers.0")(x.clone()) - x
        weights.finish("")
        assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
        matrices, vectors = read.weight_shapes(48, read.count)
        assert weights.loaded_bytes == 4 * (sum(n * k for n, k in matrices) + vectors + len(norm))
