"""Packed models on a CPU: same fingerprint, same weights, same tokens; damage is a typed error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
import torch
import unweight_models

from emberline import LLM, SamplingParams
from emberline.cli.__main__ import main
from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.models.loader import load_decoder
from emberline.models.weights import Weights
from emberline.unweight import model
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.tensor import is_coded

CODEC = select_weight_codec(find_library())
LARGER = tiny.config("llama", vocab_size=301, hidden_size=96, intermediate_size=200, num_attention_heads=12)
PROMPT = "The history of the city begins"


def pack_checkpoint(source: Path, target: Path) -> Path:
    model.pack_model(source, target, CODEC, lambda _: None)
    assert any(is_coded(info) for info in Checkpoint.open(target).tensors.values())
    return target


@pytest.mark.parametrize(
    ("dtype", "native"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True), (torch.float32, True)],
    ids=str,
)
def test_packed_model_has_same_weights_and_fingerprint(tmp_path: Path, dtype: torch.dtype, native: bool) -> None:
    layers = 3 if native else 1  # without native kernels numpy decodes, which is slow
    source = tiny.write(tmp_path / "plain", LARGER | {"num_hidden_layers": layers}, dtype=dtype, shards=2)
    target = pack_checkpoint(source, tmp_path / "packed")
    ops.start_backend(native=native)
    try:
        assert load_decoder(source).fingerprint == load_decoder(target).fingerprint
        plain, ours = Weights(Checkpoint.open(source)), Weights(Checkpoint.open(target))
        for name, info in plain.checkpoint.tensors.items():
            take = (name, *info.shape)
            a = plain.load_vector(*take) if len(info.shape) == 1 else plain.load_matrix(*take)
            b = ours.load_vector(*take) if len(info.shape) == 1 else ours.load_matrix(*take)
            assert torch.equal(a, b) and a.dtype == b.dtype, name
        ours.finish("")
        assert plain.loaded_bytes == ours.loaded_bytes
    finally:
        ops.start_backend()


def test_packed_experts_give_same_output(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["qwen3-moe"], "hidden_size": 96, "moe_intermediate_size": 88}
    source = tiny.write(tmp_path / "plain", config, dtype=torch.bfloat16, shards=2)
    target = pack_checkpoint(source, tmp_path / "packed")
    assert main(["unweight", "verify", str(source), str(target), "--quiet"]) == 0
    assert is_coded(Checkpoint.open(target).tensor_info("model.layers.2.mlp.experts.6.down_proj.weight"))
    plain, ours = load_decoder(source), load_decoder(target)
    assert (plain.fingerprint, plain.weight_bytes) == (ours.fingerprint, ours.weight_bytes)
    x = torch.randn(9, 96)
    for a, b in zip(plain.layers, ours.layers, strict=True):
        assert torch.equal(a.ffn(x.clone(), None), b.ffn(x.clone(), None))


def test_other_model_has_other_fingerprint(tmp_path: Path) -> None:
    one = pack_checkpoint(tiny.write(tmp_path / "a", LARGER, dtype=torch.bfloat16), tmp_path / "pa")
    two = pack_checkpoint(tiny.write(tmp_path / "b", LARGER, dtype=torch.bfloat16, seed=1), tmp_path / "pb")
    assert load_decoder(one).fingerprint != load_decoder(two).fingerprint


def test_head_equal_to_embedding_is_dropped_in_packed_files(tmp_path: Path) -> None:
    config = {**LARGER, "tie_word_embeddings": True}
    tensors = tiny.tensors(config, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    made = load_decoder(pack_checkpoint(tiny.write_tensors(tmp_path / "plain", config, tensors), tmp_path / "packed"))
    assert made.embedding is made.head.weight


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_damage_is_a_typed_error_that_names_the_tensor(tmp_path: Path, name: str) -> None:
    target = pack_checkpoint(tiny.write(tmp_path / "plain", LARGER, dtype=torch.bfloat16), tmp_path / "packed")
    info = Checkpoint.open(target).tensor_info(name)
    with info.file.open("r+b") as file:
        file.seek(info.offset + info.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(info.offset + info.nbytes // 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ModelFileError, match=name):
        load_decoder(target)


@pytest.mark.parametrize("change", [{"dtype": "I16"}, {"shape": [1 << 40, 1 << 40]}, {"codec": "zip"}])
def test_false_tensor_metadata_is_a_typed_error(tmp_path: Path, change: dict[str, object]) -> None:
    target = pack_checkpoint(tiny.write(tmp_path / "plain", LARGER, dtype=torch.bfloat16), tmp_path / "packed")
    unweight_models.lie(target / "model.safetensors", "model.embed_tokens.weight", change)
    with pytest.raises((ModelFileError, UnsupportedModel)):
        load_decoder(target)


def test_truncated_file_is_a_typed_error(tmp_path: Path) -> None:
    target = pack_checkpoint(tiny.write(tmp_path / "plain", LARGER, dtype=torch.bfloat16), tmp_path / "packed")
    whole = (target / "model.safetensors").read_bytes()
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (target / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(ModelFileError):
            load_decoder(target)


def test_other_device_refuses_packed_files(tmp_path: Path) -> None:
    weights = Weights(Checkpoint.open(pack_checkpoint(tiny.write(tmp_path / "m", LARGER), tmp_path / "packed")))
    weights.device = torch.device("cuda")
    with pytest.raises(UnsupportedModel, match="packed"):
        weights.load_matrix("lm_head.weight", 301, 96)


def test_packed_smollm2_gives_same_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unweight", "pack", "smollm2", str(tmp_path / "packed"), "--quiet"]) == 0
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    outputs = [
        LLM(where, kv_memory=1 << 27).generate([PROMPT], params, progress=False)[0].tokens
        for where in (resolve_model("smollm2", as_safetensors=True), tmp_path / "packed")
    ]
    assert len(outputs[0]) == 50 and outputs[0] == outputs[1]
    assert main(["doctor", "--model", str(tmp_path / "packed")]) in (0, 1)
    assert "179 MB of weights" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "packed")
