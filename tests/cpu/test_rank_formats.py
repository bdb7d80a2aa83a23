"""Quantised, GGUF and packed checkpoints on several ranks: parts are cut at groups, and logits equal one rank's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_families
import ggufs
import pytest
import quantised_checkpoints
import rank_models
import tiny
import tiny_deepseek
import tiny_families
import tiny_fused_experts
import torch
from publisher_packers import FORMATS
from rank_models import assert_same, compute_logits, load_rank, run_ranks
from safetensors.torch import load_file
from torch import Tensor

from emberline.core.errors import UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.convert import index_gguf
from emberline.models.config import ModelConfig
from emberline.models.device_weights import DeviceWeights
from emberline.models.shard import Shard
from emberline.models.weights import Weights
from emberline.unweight import model as unweight
from emberline.unweight.codec import select_weight_codec

LAYER = "model.layers.0"
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 131}
PARTS = {"self_attn.q_proj": 0, "self_attn.k_proj": 0, "self_attn.o_proj": 1, "mlp.up_proj": 0, "mlp.down_proj": 1}
SHAPES = dict.fromkeys(PARTS, (64, 64)) | {"self_attn.q_proj": (128, 64), "self_attn.o_proj": (64, 128)}
SHAPES |= {"mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
ORDERED = ("int4 order", "gptq order")


def write_published(directory: Path, name: str, layers: int = 1) -> Path:
    """Write a checkpoint whose matrices of layers have a format of FORMATS."""
    tensors = tiny.tensors(config := tiny.config("llama", **SIZES | {"num_hidden_layers": layers}))
    for matrix in [name for name in tensors if "_proj.weight" in name]:
        packed, _ = FORMATS[name].pack(tensors.pop(matrix))
        tensors |= {f"{matrix.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
    return tiny.write_tensors(directory, config | {"quantization_config": FORMATS[name].config}, tensors)


def load_matrices(weights: Weights, names: list[str]) -> list[Tensor]:
    infos = [weights.checkpoint.tensor_info(f"{LAYER}.{name}.weight") for name in names]
    loaded = [weights.load_matrix(f"{LAYER}.{name}.weight", *i.shape) for name, i in zip(names, infos, strict=True)]
    weights.finish(".*")
    return loaded


@pytest.mark.parametrize("kind", [Weights, DeviceWeights])
@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_published_formats(name: str, kind: type[Weights], tmp_path: Path) -> None:
    """The parts that ranks load, joined, are the whole matrix. Each reads only the bytes of its part."""
    options = {"device": "cpu", "keeps_quantised": False} if kind is DeviceWeights else {}
    checkpoint = Checkpoint.open(write_published(tmp_path, name))
    if name in ORDERED:
        with pytest.raises(UnsupportedModel, match=r"down_proj.weight.* by columns: .* a group of 32 columns"):
            kind(checkpoint, shard=Shard(0, 2), **options)
        return
    one = kind(checkpoint, **options)
    whole = load_matrices(one, list(PARTS))
    ranks = [kind(checkpoint, shard=Shard(rank, 2), **options) for rank in range(2)]
    parts = [load_matrices(weights, list(PARTS)) for weights in ranks]
    for place, (matrix, dimension) in enumerate(PARTS.items()):
        joined = torch.cat([part[place] for part in parts], dim=dimension)
        assert whole[place].shape == SHAPES[matrix] and torch.equal(joined, whole[place]), matrix
    if kind is Weights:
        assert sum(weights.read_bytes for weights in ranks) <= 1.05 * one.read_bytes


@pytest.mark.parametrize("name", ["int4 zeros", "fp8 block", "mxfp4"])
def test_logits_of_published_formats(name: str, tmp_path: Path) -> None:
    write_published(tmp_path, name)
    assert_same(run_ranks(tmp_path, 2), compute_logits(load_rank(tmp_path, Shard())))


def test_groups_that_would_be_divided_are_named(tmp_path: Path) -> None:
    write_published(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_attention_heads": 8, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(UnsupportedModel, match=r"'.*down_proj.weight' .* a part from 0 to 16 .* a group of 32 weights"):
        Weights(Checkpoint.open(tmp_path), shard=Shard(0, 8))


def test_experts_in_mxfp4_blocks(tmp_path: Path) -> None:
    """gpt-oss: blocks of 32 columns, with the rows of gate and up in turn; divided by width and by experts."""
    sizes = rank_models.HEADS | {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
    config = rank_models.GPT_OSS | sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    tensors = tiny_fused_experts.tensors(config)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape[:3], generator=random, dtype=torch.uint8)
    config |= {"quantization_config": quantised_checkpoints.MXFP4}
    tiny.write_tensors(tmp_path, config, tensors)
    whole = compute_logits(load_rank(tmp_path, Shard()))
    assert_same(run_ranks(tmp_path, 2), whole)
    assert_same(run_ranks(tmp_path, 4, 2), whole)


@pytest.mark.parametrize("form", ["gguf", "plain"])
def test_llama_in_gguf_blocks(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of queries and keys are in another order within a head; columns are cut at blocks of 32."""
    monkeypatch.setattr(ggufs, "FFN", 128)
    ggufs.write(tmp_path / "m.gguf", quant="Q8_0")
    directory = index_gguf(tmp_path / "m.gguf", tmp_path / "model")
    dtype = None if form == "gguf" else torch.float32
    whole = compute_logits(load_rank(directory, Shard(), form=form, dtype=dtype))
    # Kernels for blocks round the inputs of a product for each block, which the ranks' blocks do not change.
    assert_same(run_ranks(directory, 2, form=form, dtype=dtype), whole)


@pytest.mark.parametrize("form", ["plain", "q8", "q4"])
def test_forms_of_bf16_weights(form: Any, tmp_path: Path) -> None:
    """Weights that are quantised at load have the same blocks, since a rank has whole blocks of 32 columns."""
    sizes = {"intermediate_size": 128, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = tiny.config("mixtral", **sizes, head_dim=8, num_hidden_layers=2, **rank_models.EXPERTS)
    tiny.write(tmp_path, config, dtype=torch.bfloat16)
    whole = compute_logits(load_rank(tmp_path, Shard(), form=form, dtype=None))
    assert_same(run_ranks(tmp_path, 2, form=form, dtype=None), whole)
    assert_same(run_ranks(tmp_path, 2, 2, form=form, dtype=None), whole)


def test_gguf_blocks_that_would_be_divided_are_named(tmp_path: Path) -> None:
    ggufs.write(tmp_path / "m.gguf", quant="Q8_0")
    directory = index_gguf(tmp_path / "m.gguf", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=r"down_proj.weight' .* from 0 to 48 of 96 .* a block of 32 weights"):
        Weights(Checkpoint.open(directory), shard=Shard(0, 2))


def write_deepseek(directory: Path) -> None:
    sizes = rank_models.DEEPSEEK | {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 8}
    tiny_deepseek.write_deepseek(directory, "v3", **sizes, rope_scaling=None, n_group=1, topk_group=1)


GGUF_FAMILIES: dict[str, tuple[str, Any]] = {
    "phi3": ("phi3", tiny_families.phi3(**rank_models.WIDE)),
    "granite": ("granite", tiny_families.granite("granite", **rank_models.WIDE, tie_word_embeddings=True)),
    "olmo2": ("olmo2", tiny_families.config("olmo2", **rank_models.HEADS)),
}


@pytest.mark.parametrize("name", [*GGUF_FAMILIES, "deepseek"])
def test_gguf_families(name: str, tmp_path: Path) -> None:
    """Files in float32 of families whose tensors are fused, reordered, or joined of two (latents)."""
    original, quantised = tmp_path / "original", ()
    if name == "deepseek":
        arch = "deepseek2"
        write_deepseek(original)
        quantised = ("attn_k_b", "attn_v_b")
    else:
        arch, config = GGUF_FAMILIES[name]
        tiny.write_tensors(original, config, tiny_families.tensors(config))
    config, tensors = json.loads((original / "config.json").read_text()), load_file(original / "model.safetensors")
    file = gguf_families.write(tmp_path / "m.gguf", arch, config, tensors, quantised=quantised)
    directory = index_gguf(file, tmp_path / "model")
    assert_same(run_ranks(directory, 2), compute_logits(load_rank(directory, Shard())))


@pytest.mark.parametrize("kind", [Weights, DeviceWeights])
def test_packed_checkpoint(kind: type[Weights], tmp_path: Path) -> None:
    config = tiny.config("llama", **SIZES | {"hidden_size": 256, "intermediate_size": 512})
    tiny.write(tmp_path / "plain", config, dtype=torch.bfloat16)
    unweight.pack_model(tmp_path / "plain", tmp_path / "packed", select_weight_codec(None), lambda _: None)
    checkpoint = Checkpoint.open(tmp_path / "packed")
    options = {"device": "cpu"} if kind is DeviceWeights else {}
    names = [*PARTS, "mlp.gate_proj"]
    whole = load_matrices(kind(checkpoint, **options), names)
    ranks = [kind(checkpoint, shard=Shard(rank, 2), **options) for rank in range(2)]
    parts = [load_matrices(weights, names) for weights in ranks]
    stored = sum(checkpoint.tensor_info(f"{LAYER}.{name}.weight").nbytes for name in names)
    by_columns = sum(checkpoint.tensor_info(f"{LAYER}.{name}.weight").nbytes for name in names if PARTS.get(name))
    # Each rank decodes whole tensors that are cut by columns. Of others it reads whole blocks, here of large parts.
    assert sum(weights.read_bytes for weights in ranks) <= 1.15 * (stored + by_columns)
    for place, name in enumerate(names):
        dimension = PARTS.get(name, 0)
        assert torch.equal(torch.cat([part[place] for part in parts], dim=dimension), whole[place]), name


def test_models_of_devices_are_loaded_in_parts(tmp_path: Path) -> None:
    """DeviceWeights fill the same parts as Weights, also of stacked experts in all three orders."""
    for name in ("phi3", "gpt-oss", "llama4-experts", "mixtral-fused", "qwen3-moe", "delta-next", "deepseek_v3"):
        rank_models.WRITERS[name](tmp_path / name)
        checkpoint, shard = Checkpoint.open(tmp_path / name), Shard(3, 4, 2)
        host = Weights(checkpoint, torch.float32, shard=shard)
        weights = DeviceWeights(checkpoint, torch.float32, "cpu", shard=shard)
        loaded = {
            tensor: (weights.stack_experts(info.shape, [rank_models.whole_part(tensor, info.shape)]), info.shape)
            for tensor, info in weights.checkpoint.tensors.items()
        }
        weights.finish("")
        assert any(info.stored_slice is not None for info in weights.checkpoint.tensors.values())
        for tensor, (found, shape) in loaded.items():
            assert torch.equal(found, host.stack_experts(shape, [rank_models.whole_part(tensor, shape)])), tensor
        assert ModelConfig.from_checkpoint(checkpoint).vocab == 131
