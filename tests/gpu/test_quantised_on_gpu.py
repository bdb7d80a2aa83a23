"""Quantised checkpoints on a GPU: logits near those of the dequantised values, and memory as planned."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from gpu_settings import gpu_config
from publisher_packers import FORMATS, PublishedFormat, compressed, pack_compressed, pack_fp8
from safetensors.torch import load_file
from test_families_on_gpu import compute_logits, load_on
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine import memory
from emberline.engine.gpu import boot
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import load_decoder
from emberline.models.tensor_names import IGNORABLE_TENSORS, load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
MIB = 1 << 20
INT4_128 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)
CASES: dict[str, PublishedFormat] = {name: FORMATS[name] for name in FORMATS if not name.endswith("block")} | {
    "fp8 128": PublishedFormat(
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, pack_fp8(128, 128, "weight_scale_inv"), "fp8", 0.04
    ),
    "int4 128": PublishedFormat(INT4_128, pack_compressed(128), "int4", 0.08),
}


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    yield
    ops.start_backend()


def write_quantised(directory: Path, plain: Path, found: PublishedFormat) -> Path:
    """Write a checkpoint with quantised layers, and replace the matrices of the plain one by their values."""
    tensors: dict[str, Tensor] = {}
    values = load_file(plain / "model.safetensors")
    for name, tensor in values.items():
        if name.endswith("_proj.weight"):
            packed, exact = found.pack(tensor.float())
            tensors |= {f"{name.removesuffix('weight')}{part}": data for part, data in packed.items()}
            values[name] = exact.to(torch.bfloat16)
        else:
            tensors[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    tiny.write_tensors(plain, config, values)
    tiny.write_tensors(directory, config | {"quantization_config": found.config}, tensors)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_logits_are_near_those_of_the_values(name: str, tmp_path: Path) -> None:
    """The kernels may quantise activations to float8 too, with 3 significant bits after the first."""
    tiny.write(tmp_path / "plain", tiny.config("qwen3", **tiny.GPU_SIZES), dtype=torch.bfloat16)
    directory = write_quantised(tmp_path / "narrow", tmp_path / "plain", CASES[name])
    ops.start_backend(native=False)
    theirs = compute_logits(load_decoder(tmp_path / "plain", "float32"), 1000)
    checkpoint = Checkpoint.open(directory)
    weights = DeviceWeights(checkpoint, None, "cuda")
    model = load_model(ModelConfig.from_checkpoint(checkpoint), weights, 64)
    weights.finish(IGNORABLE_TENSORS)
    ours = compute_logits(model, 1000)
    plain = compute_logits(load_on("cuda", Checkpoint.open(tmp_path / "plain"), torch.bfloat16), 1000)
    error, rounding = (float((each - theirs).abs().mean() / theirs.abs().mean()) for each in (ours, plain))
    print(f"{name}: kept={len(weights.quantised_sizes)} error={error:.4f} bf16={rounding:.4f}")
    assert error < (3 * rounding + 0.1 if CASES[name].kind == "fp8" else 2 * rounding + 0.01)


@pytest.mark.parametrize("weights", ["plain", "auto", "packed", "fp8", "int4"])
def test_memory_is_as_planned(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts the bytes of weights that are allocated, and a request is served. With auto, files are int4."""
    monkeypatch.setattr(boot, "CAPTURE_BUDGET_S", 0.2)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "max_position_embeddings": 2048}
    tiny.write(tmp_path / "plain", tiny.config("qwen3", **sizes), dtype=torch.bfloat16)
    directory = tmp_path / "plain"
    if weights in ("auto", "packed"):
        directory = write_quantised(tmp_path / "narrow", tmp_path / "plain", CASES["int4 128"])
    settings = gpu_config(weights=weights, max_running=4, max_batch_tokens=256, kv_memory=64 * MIB, max_context=512)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_checkpoint(checkpoint)
    online = settings.gpu.online_format
    placed = DeviceWeights(checkpoint, None, "cuda", packed=weights == "packed", online=online)
    model = load_model(config, placed, 512)
    placed.finish(IGNORABLE_TENSORS)
    torch.cuda.synchronize()
    rope = 2 * 512 * 64 * 4  # tables of angles, which are not weights
    allocated = torch.cuda.memory_allocated() - before - rope
    planned = memory.weight_bytes(config, 2, packed=placed.packed, quantised=placed.quantised_sizes)
    if placed.quantised_sizes and not placed.packed:
        allocated += ops.add_packed_copy(model.head.weight)
    print(f"{weights}: allocated={allocated} planned={planned} ratio={allocated / planned:.4f}")
    assert abs(allocated - planned) < 0.02 * planned
    del model, placed
    booted = boot.boot_from_checkpoint(directory, settings)
    booted.engine.add(Submission("a", list(range(40)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
    tokens: list[int] = []
    while not booted.engine.idle:
        tokens += [token for output in booted.engine.step() for token in output.tokens]
    assert len(tokens) == 8
    assert abs(booted.plan.weights - planned) < 0.02 * planned
    print(f"{weights}: format={booted.weights} plan={booted.plan.weights}")


def test_nan_scales_are_named(tmp_path: Path) -> None:
    tiny.write(tmp_path / "plain", tiny.config("qwen3", **tiny.GPU_SIZES), dtype=torch.bfloat16)
    directory = write_quantised(tmp_path / "narrow", tmp_path / "plain", CASES["int4 128"])
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][3, 1] = float("nan")
    tiny.write_tensors(directory, json.loads((directory / "config.json").read_text()), tensors)
    with pytest.raises(ModelFileError, match=r"scales of tensor 'model.layers.1.mlp.up_proj.weight'.* NaN"):
        load_on("cuda", Checkpoint.open(directory), torch.bfloat16)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_scales_of_a_float8_cache_change_no_bits(model_type: str, tmp_path: Path) -> None:
    """They are powers of two, moved between weights, so that logits with a cache in bf16 stay the same."""
    plain = tiny.write(tmp_path, tiny.config(model_type, **tiny.GPU_SIZES), dtype=torch.bfloat16)
    tensors = load_file(plain / "model.safetensors")
    for layer in range(3):
        for kind, scale in (("k", 0.03 * (layer + 1)), ("v", 2.5)):
            tensors[f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(scale)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    tiny.write_tensors(plain, config, tensors)
    logits = []
    for kv_scales in (False, True):
        checkpoint = Checkpoint.open(plain)
        weights = DeviceWeights(checkpoint, None, "cuda", kv_scales=kv_scales)
        model = load_model(ModelConfig.from_checkpoint(checkpoint), weights, 64)
        weights.finish(IGNORABLE_TENSORS)
        logits.append(compute_logits(model, 1000))
    assert torch.equal(*logits)
