"""Checkpoints as their publishers ship them, compared with transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints
import random_checkpoints
import tiny
import torch
from paged_model import Cache, assert_close, prompts
from torch import Tensor

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import ModelError, ModelFileError, UnsupportedModel
from emberline.engine import memory
from emberline.engine.boot import boot
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import load_decoder
from emberline.models.quantisation_config import QuantisationConfig, check_kv_scheme, read_quantisation
from emberline.models.weight_dtype import stored_weight_dtype
from emberline.models.weights import Weights
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.model import pack_model


def test_multimodal_llama4(tmp_path: Path) -> None:
    """The language model is loaded and the vision model is not; the rope of Scout has no interpolated frequencies."""
    theirs, tokens = random_checkpoints.write_multimodal_llama4(tmp_path), prompts(37, 20)
    with torch.inference_mode():
        expected = [theirs.language_model(torch.tensor([ids])).logits[0] for ids in tokens]
    model = load_decoder(tmp_path)
    assert model.config.model_type == "llama4_text" and model.config.windows == (16, 16, 16, 0)
    assert_close(Cache(model, tokens, 1).run(1), expected)


def write_gpt_oss(directory: Path) -> Any:
    """Write random experts in the published format, and return the model of transformers with their values."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = random_checkpoints.write(directory, "gpt-oss", hidden_size=64, intermediate_size=32)
    random = torch.Generator().manual_seed(3)

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(120, 126, blocks.shape[:3], generator=random, dtype=torch.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            theirs.state_dict()[name].copy_(mxfp4.convert_moe_packed_tensors(blocks, scales))
        config["quantization_config"] = quantised_checkpoints.MXFP4

    quantised_checkpoints.rewrite(directory, change)
    return theirs


def check_logits(directory: Path, theirs: Any) -> DecoderModel:
    tokens = prompts(37, 20)
    with torch.inference_mode():
        expected = [theirs(torch.tensor([ids])).logits[0] for ids in tokens]
    model = load_decoder(directory, "float32")
    assert_close(Cache(model, tokens, 1).run(1), expected)
    return model


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model = check_logits(tmp_path, write_gpt_oss(tmp_path))
    assert model.weight_bytes == memory.weight_bytes(model.config, 4)
    kept = load_decoder(tmp_path, "bfloat16")
    assert kept.weight_bytes == memory.weight_bytes(kept.config, 2)


def test_all_mxfp4_values_equal_those_of_transformers(tmp_path: Path) -> None:
    """Each scale occurs with each code, but for those whose products may be subnormal or infinite."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(250, 1).view(1, 250, 16, 16)
    scales = torch.arange(3, 253, dtype=torch.uint8)[None, :, None].repeat(1, 1, 16)
    tensors = {"x_blocks": blocks, "x_scales": scales}
    tiny.write_tensors(tmp_path, tiny.config("qwen3", quantization_config=quantised_checkpoints.MXFP4), tensors)
    found: list[Tensor] = []
    Weights(Checkpoint.open(tmp_path)).experts_linear(
        "x", (1, 512, 250), lambda part: found.append(part) or torch.zeros(64, 64)
    )
    assert torch.equal(found[0], mxfp4.convert_moe_packed_tensors(blocks, scales)[0])


def test_mxfp4_checkpoint_runs_as_its_values_in_bfloat16(tmp_path: Path) -> None:
    """The published files have all other tensors in bfloat16, in which the values of the experts are exact."""
    theirs = write_gpt_oss(tmp_path / "mxfp4")

    def round_all(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= {name: value.to(torch.bfloat16) for name, value in tensors.items() if value.is_floating_point()}

    quantised_checkpoints.rewrite(tmp_path / "mxfp4", round_all)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    pack_model(tmp_path / "mxfp4", tmp_path / "packed", select_weight_codec(None), lambda *_: None)
    plain, *others = (load_decoder(tmp_path / name) for name in ("plain", "mxfp4", "packed"))
    assert plain.dtype == torch.bfloat16 and others[0].config == plain.config
    tokens = prompts(20)
    expected = Cache(plain, tokens).step([20])
    for model in others:
        assert model.weight_bytes == plain.weight_bytes == memory.weight_bytes(plain.config, 2)
        assert torch.equal(Cache(model, tokens).step([20]), expected)
    booted = boot(EngineConfig.build(str(tmp_path / "mxfp4"), device="cpu", kv_memory=1 << 20))
    assert (booted.stored_dtype, booted.numerics.dtype, booted.full_context) == ("mxfp4", "bfloat16", 0)
    assert booted.weight_bytes == plain.weight_bytes


def is_deepseek_matrix(name: str) -> bool:
    return name.endswith("_proj.weight") or "kv_a_proj_with_mqa" in name


def test_deepseek_in_fp8(tmp_path: Path) -> None:
    """Blocks at the edges of a matrix are smaller: 28 rows, and 48 columns, are no multiples of 16 and 32."""
    theirs = random_checkpoints.write(tmp_path, "deepseek-v3")
    quantised_checkpoints.use_fp8(tmp_path, theirs, is_quantised=is_deepseek_matrix)
    check_logits(tmp_path, theirs)
    assert stored_weight_dtype(Checkpoint.open(tmp_path)) == "bfloat16"


def test_fp8_values_equal_those_of_transformers(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, scales, _ = quantised_checkpoints.quantise_fp8(torch.randn(48, 32, generator=torch.Generator()) * 3)
    config = tiny.config("qwen3", quantization_config=quantised_checkpoints.FP8)
    tiny.write_tensors(tmp_path, config, {"x.weight": codes, "x.weight_scale_inv": scales})
    ours = Weights(Checkpoint.open(tmp_path)).load_matrix("x.weight", 48, 32)
    expected = fp8.Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, expected)


def test_kimi_in_int4(tmp_path: Path) -> None:
    """The experts of Kimi K2.5 have four bits, and its tensors and config are those of a multimodal model."""
    theirs = random_checkpoints.write(tmp_path, "deepseek-v3")
    quantised_checkpoints.use_int4(tmp_path, theirs, is_quantised=lambda name: ".mlp.experts." in name)

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors |= {
            name: torch.ones(2) for name in ("vision_tower.patch_embed.proj.bias", "mm_projector.pre_norm.bias")
        }
        text = {**config, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
        config.clear()
        config |= {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}
        config |= {"text_config": text, "vision_config": {"hidden_size": 2}, "media_placeholder_token_id": 7}

    quantised_checkpoints.rewrite(tmp_path, change)
    assert check_logits(tmp_path, theirs).config.model_type == "kimi_k2"


@pytest.mark.parametrize("packed", [False, True])
def test_matrices_in_fp8_on_a_device(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device gets the values that the CPU has, whether its matrices are plain or packed again."""
    config = tiny.config("qwen3", quantization_config=quantised_checkpoints.FP8)
    tensors = {}
    for name in ("gate", "up"):
        codes, scales, _ = quantised_checkpoints.quantise_fp8(torch.randn(64, 48))
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}
    tiny.write_tensors(tmp_path, config, tensors)
    parts = [("gate.weight", 64), ("up.weight", 64)]
    checkpoint = Checkpoint.open(tmp_path)
    expected = Weights(checkpoint).stack(parts, 48)
    weights, filled = DeviceWeights(checkpoint, device="cpu", packed=packed), []
    monkeypatch.setattr(ops, "fill_weight", lambda weight, values: filled.append(values) or 0)
    if packed:
        weights.linear(parts, 48)
    else:
        filled.append(weights.stack(parts, 48))
    weights.finish("")
    assert len(filled) == 1 and torch.equal(filled[0], expected)


def test_incomplete_quantised_tensors(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["model.layers.2.mlp.experts.down_proj_scales"]

    write_gpt_oss(tmp_path)
    quantised_checkpoints.rewrite(tmp_path, drop)
    with pytest.raises(
        ModelFileError, match=r"lacks the scales .*\(1\): 'model.layers.2.mlp.experts.down_proj_scales'"
    ):
        load_decoder(tmp_path)

    def drop_both(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["model.layers.2.mlp.experts.down_proj_blocks"]
        tensors["model.layers.2.mlp.experts.other_blocks"] = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
        tensors["model.layers.2.mlp.experts.other_scales"] = torch.zeros(1, 1, 1, dtype=torch.uint8)

    quantised_checkpoints.rewrite(tmp_path, drop_both)
    with pytest.raises(
        ModelFileError, match=r"requires \(1\): '.*2.mlp.experts.down_proj'; unused tensors \(1\): '.*experts.other'"
    ):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("down_proj_scales", torch.zeros(5, 64, 2, dtype=torch.uint8)),
        ("down_proj_scales", torch.zeros(5, 64, 1)),
        ("down_proj_blocks", torch.zeros(5, 64, 1, 8, dtype=torch.uint8)),
    ],
)
def test_quantised_tensors_of_another_shape(name: str, tensor: Tensor, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"model.layers.2.mlp.experts.{name}"] = tensor

    write_gpt_oss(tmp_path)
    quantised_checkpoints.rewrite(tmp_path, change)
    with pytest.raises(ModelFileError, match=rf"{name}' in .* has the dtype"):
        load_decoder(tmp_path)


INT4 = quantised_checkpoints.INT4
WEIGHTS = quantised_checkpoints.INT4_WEIGHTS
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "bits is '8'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:x": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits is '3'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is '32'"),
        ({**quantised_checkpoints.FP8, "activation_scheme": "other"}, "activation_scheme is 'other'"),
        ({**quantised_checkpoints.FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**INT4, "format": "int-quantized"}, "format is 'int-quantized'"),
        ({**INT4, "config_groups": {"group_0": {"weights": {**FP8_WEIGHTS, "symmetric": False}}}}, "symmetric"),
        ({**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "actorder": "random"}}}}, "actorder"),
        ({**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "num_bits": 8}}}}, "num_bits"),
        ({**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "strategy": "tensor"}}}}, "strategy"),
        ({**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "type": "float"}}}}, "group_size is '8'"),
        ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_unknown_quantisation_is_refused(section: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quantization_config.*{word}"):
        ModelConfig.from_hf(tiny.config("qwen3", quantization_config=section))


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({**INT4, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme: num_bits is '4'"),
        ({**INT4, "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme: type is 'int'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "is 'NVFP4'"),
    ],
)
def test_other_kv_schemes_are_refused_only_with_a_float8_cache(section: dict[str, Any], word: str) -> None:
    config = tiny.config("qwen3", quantization_config=section)
    ModelConfig.from_hf(config)
    with pytest.raises(UnsupportedModel, match=word):
        check_kv_scheme(config)
    check_kv_scheme({})


def test_modelopt_file_is_read(tmp_path: Path) -> None:
    tiny.write_tensors(tmp_path, tiny.config("qwen3"), {"x": torch.ones(1)})

    def read(section: object) -> QuantisationConfig | None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(section))
        return read_quantisation(Checkpoint.open(tmp_path).config)

    made = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["a.b"]}
    found = read({"producer": {"name": "modelopt"}, "quantization": made})
    assert found is not None and found.names == ("nvfp4",) and found.find_format("a.b") is None
    assert read({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}) is None
    with pytest.raises(UnsupportedModel, match=r"hf_quant_config\.json, quantization: quant_algo is 'W4A8_AWQ'"):
        read({"quantization": {"quant_algo": "W4A8_AWQ"}})
    for damaged in ({}, {"quantization": 3}, {"quantization": {"quant_algo": 3}}, []):
        with pytest.raises(ModelFileError, match=r"hf_quant_config\.json"):
            read(damaged)


@pytest.mark.parametrize("size", [[128, 10**11], [128.9, 128], [0, 128], [-1, 128]], ids=str)
def test_impossible_block_sizes_are_refused(size: list[float]) -> None:
    section = {**quantised_checkpoints.FP8, "weight_block_size": size}
    with pytest.raises(ModelError, match="weight_block_size"):
        ModelConfig.from_hf(tiny.config("qwen3", quantization_config=section))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("llama4", "model.layers.1.feed_forward.experts.gate_up_proj"),
        ("llama4", "model.layers.3.feed_forward.experts.down_proj"),
        ("deepseek-v3", "model.layers.0.self_attn.kv_b_proj.weight"),
        ("deepseek-v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("deepseek-v2", "model.layers.1.mlp.experts.7.up_proj.weight"),
        ("gpt-oss", "model.layers.1.self_attn.sinks"),
        ("gpt-oss", "model.layers.1.mlp.experts.gate_up_proj_bias"),
    ],
)
def test_missing_and_extra_tensors_are_listed(name: str, missing: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.other.weight"] = torch.ones(2)

    def drop(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors[missing]

    random_checkpoints.write(tmp_path, name)
    quantised_checkpoints.rewrite(tmp_path, change)
    with pytest.raises(ModelFileError, match=r"does not use \(1\): 'model.layers.0.other.weight'"):
        load_decoder(tmp_path)
    quantised_checkpoints.rewrite(tmp_path, drop)
    with pytest.raises(ModelFileError, match=rf"lacks tensors .*'{missing}'.*unused.*'model.layers.0.other.weight'"):
        load_decoder(tmp_path)
