"""GGUF files are served as they are: matrices stay in their blocks in memory, and nothing is converted on disk."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import gguf
import ggufs
import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray
from paged_model import Cache, prompts
from torch import Tensor

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.dequant import dequantise
from emberline.hub.gguf_tensors import INDEX_FILE, GGUFTensorInfo
from emberline.hub.source import resolve_model
from emberline.kernels import gguf_blocks
from emberline.kernels.cpu import weight_arena
from emberline.kernels.cpu.weight_arena import WeightArena
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.quantise_blocks import quantise_blocks
from emberline.models import tensor_names
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import load_checkpoint, load_decoder
from emberline.models.reader import weight_file_paths
from emberline.models.weight_form import (
    check_requested_weights,
    choose_weight_form,
    kept_weight_bytes,
)
from emberline.models.weights import Weights

TOKENS = prompts(20)


def make_values(*, tied: bool = False, seed: int = 7) -> dict[str, NDArray[np.float32]]:
    """Return tensors of a size that a trained model has: with larger ones, attention would amplify every error."""
    values = ggufs.tensors("llama", np.random.default_rng(seed), tied)
    return {name: value * np.float32(0.1 if value.ndim > 1 else 1.0) for name, value in values.items()}


def make_model(tmp_path: Path, quant: str = "Q4_1", *, tied: bool = False, types: dict[str, str] | None = None) -> Path:
    ggufs.write(tmp_path / "m.gguf", quant=quant, values=make_values(tied=tied), types=types)
    return resolve_model(str(tmp_path / "m.gguf"), tmp_path / "cache")


def compute_logits(model: DecoderModel) -> Tensor:
    return Cache(model, TOKENS).step([20])


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_stay_in_memory(quant: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, quant, tied=True)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    model, exact = load_decoder(directory), load_decoder(directory, "float32")
    assert relative_error(compute_logits(model), compute_logits(exact)) < 0.05
    assert model.dtype is torch.bfloat16 and model.embedding is model.head.weight
    assert model.fingerprint != load_decoder(directory, "bfloat16").fingerprint
    if model.head.weight.layout >= 0:  # the native kernels are built
        weights = [model.head.weight, model.layers[0].ffn.down.weight, model.layers[0].attention.qkv.weight]  # type: ignore[attr-defined]
        assert {weight.layout for weight in weights} == {WeightLayout[quant]}
        # Panels of columns are padded, which shows in a model as small as this.
        assert model.weight_bytes < 1.5 * (tmp_path / "m.gguf").stat().st_size
        assert model.stack is not None


def test_float32_is_exact(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "Q4_0")
    name, kind = "model.layers.0.mlp.up_proj.weight", gguf.GGMLQuantizationType.Q4_0
    stored = make_values()["blk.0.ffn_up.weight"]
    loaded = Weights(Checkpoint.open(directory), torch.float32).load_matrix(name, ggufs.FFN, ggufs.HIDDEN)
    assert np.array_equal(loaded.numpy(), gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind))


def test_rows_of_several_types_are_one_matrix(tmp_path: Path) -> None:
    types = {f"blk.{layer}.attn_v.weight": "Q5_0" for layer in range(ggufs.LAYERS)} | {"blk.1.ffn_up.weight": "Q4_1"}
    directory = make_model(tmp_path, "Q8_0", types=types)
    model, exact = load_decoder(directory), load_decoder(directory, "float32")
    qkv = model.layers[0].attention.qkv.weight
    assert [part.n for part in qkv.parts] == [96, 32] and qkv.layout is WeightLayout.PARTS
    assert relative_error(compute_logits(model), compute_logits(exact)) < 0.05


def test_two_types_of_rows_run_as_one_native_call(tmp_path: Path) -> None:
    types = {f"blk.{layer}.attn_v.weight": "Q8_0" for layer in range(ggufs.LAYERS)}
    model = load_decoder(make_model(tmp_path, types=types))
    assert model.stack is not None and [len(layer.qkv.weight.parts) for layer in model.stack.layers] == [2, 2]
    native = compute_logits(model)
    assert torch.equal(native, compute_logits(replace(model, stack=None)))
    three = types | {f"blk.{layer}.attn_k.weight": "Q5_0" for layer in range(ggufs.LAYERS)}
    (tmp_path / "three").mkdir()
    assert load_decoder(make_model(tmp_path / "three", types=three)).stack is None


def test_types_without_a_kernel_are_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_model(tmp_path, "Q5_1")
    monkeypatch.delitem(gguf_blocks.BLOCK_FORMATS, "Q5_1")
    with caplog.at_level(logging.INFO, "emberline.engine"):
        model = load_decoder(directory)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Weights dequantised: model=m-") and "tensors=16" in line and "'Q5_1'" in line
    plain = load_decoder(directory, "bfloat16")
    assert torch.equal(compute_logits(model), compute_logits(plain))


def test_weights_of_a_gpu_are_dequantised(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_model(tmp_path))
    converted = Checkpoint.open(resolve_model(str(tmp_path / "m.gguf"), tmp_path / "cache", as_safetensors=True))
    assert weight_file_paths(checkpoint) == [] and weight_file_paths(converted)
    rows = [(f"model.layers.1.self_attn.{name}_proj.weight", size) for name, size in (("q", 64), ("k", 32), ("v", 32))]
    found = []
    for weights in (DeviceWeights(checkpoint, None, "cpu"), Weights(converted)):
        qkv, norm = weights.stack(rows, 64), weights.load_vector("model.norm.weight", 64, offset=1.0)
        weights.finish(".*")
        found.append((qkv, norm))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_missing_or_changed_file_is_named(tmp_path: Path) -> None:
    directory, file = make_model(tmp_path), tmp_path / "m.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ModelFileError, match=rf"m\.gguf, .* has {len(whole) - 1} bytes instead of {len(whole)}"):
        Checkpoint.open(directory)
    with pytest.raises(ModelFileError, match="is misaligned, overlaps a tensor or ends after the file"):
        resolve_model(str(file), tmp_path / "cache")
    file.unlink()
    with pytest.raises(ModelFileError, match=r"m\.gguf, .* is missing"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("form", ["gguf", "plain"])
def test_a_scale_that_is_no_number_is_named(form: str, tmp_path: Path) -> None:
    directory, file = make_model(tmp_path), tmp_path / "m.gguf"
    checkpoint = Checkpoint.open(directory)
    info = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    content = bytearray(file.read_bytes())
    content[info.offset + info.nbytes - 20 : info.offset + info.nbytes - 18] = b"\0\x7e"  # NaN
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' in .*m\.gguf: .* is NaN"):
        load_checkpoint(checkpoint, "bfloat16", None, "gguf" if form == "gguf" else "plain")


def test_names_and_shapes_of_large_checkpoints_are_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(make_model(tmp_path))
    monkeypatch.setattr(tensor_names, "MIN_CHECKED_BYTES", 0)
    name = "model.layers.1.mlp.down_proj.weight"
    info = checkpoint.tensors[name]
    load_checkpoint(checkpoint, "bfloat16", None, "gguf")
    monkeypatch.setattr(Weights, "_view_file_bytes", None)  # values must not be read
    wrong = {**checkpoint.tensors, name: replace(info, shape=info.shape[::-1])}
    with pytest.raises(ModelFileError, match=rf"{name}' in .*m\.gguf has the shape"):
        load_checkpoint(replace(checkpoint, tensors=wrong), "bfloat16", None, "gguf")
    del wrong[name]
    with pytest.raises(ModelFileError, match=rf"lacks tensors .*'{name}'"):
        load_checkpoint(replace(checkpoint, tensors=wrong), "bfloat16", None, "gguf")


def test_the_index_is_made_again_if_its_link_is_gone(tmp_path: Path) -> None:
    """The hub's cache has a link to the same file for each revision."""
    make_model(tmp_path)
    links = [tmp_path / revision / "m.gguf" for revision in ("a", "b")]
    for link in links:
        link.parent.mkdir()
        link.symlink_to(tmp_path / "m.gguf")
    first = resolve_model(str(links[0]), tmp_path / "cache")
    links[0].unlink()
    assert resolve_model(str(links[1]), tmp_path / "cache") == first and Checkpoint.open(first).tensors


@pytest.mark.parametrize(
    ("field", "value"), [("type", "Q9_9"), ("nbytes", 17), ("offset", 1 << 40), ("file", 3), ("shape", "x")]
)
def test_a_damaged_index_is_refused(field: str, value: object, tmp_path: Path) -> None:
    directory = make_model(tmp_path)
    index = json.loads((directory / INDEX_FILE).read_text())
    index["tensors"]["lm_head.weight"][field] = value
    (directory / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"gguf\.json is damaged"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(("kind", "bound"), [("Q4_0", 0.09), ("Q8_0", 0.006)])
def test_quantised_at_load(kind: str, bound: float) -> None:
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    values[0] = 0.0
    values[1, :32] = 1e6  # more than the steps of float16 reach
    blocks = quantise_blocks(values, kind)
    size = {"Q4_0": 18, "Q8_0": 34}[kind]
    decoded = torch.from_numpy(dequantise(blocks.numpy().data.cast("B"), kind, size)).view(8, 96)
    assert blocks.shape == (8, 3 * size) and decoded.isfinite().all() and not decoded[0].any()
    assert relative_error(decoded[2:], values[2:]) < bound


def test_q4_and_q8_quantise_a_checkpoint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    checkpoint = Checkpoint.open(
        tiny.write(tmp_path, tiny.CONFIGS["qwen3-moe"] | sizes | {"moe_intermediate_size": 32})
    )
    exact = load_checkpoint(checkpoint, "float32")
    models = {form: load_checkpoint(checkpoint, form=form) for form in ("q4", "q8")}
    errors = {form: relative_error(compute_logits(model), compute_logits(exact)) for form, model in models.items()}
    assert errors["q8"] < 0.2 and errors["q8"] < errors["q4"] < 1.0
    assert len({exact.fingerprint, *(model.fingerprint for model in models.values())}) == 3
    router = models["q4"].layers[0].ffn.mixture.router  # type: ignore[attr-defined]
    assert router.layout in (WeightLayout.F32, WeightLayout.PLAIN)
    config = ModelConfig.from_checkpoint(checkpoint)
    assert kept_weight_bytes(checkpoint, config, "q4") < kept_weight_bytes(checkpoint, config, "q8")


def test_unsuitable_requests_are_refused(tmp_path: Path) -> None:
    quantised = Checkpoint.open(make_model(tmp_path))
    assert choose_weight_form(quantised) == "gguf" and choose_weight_form(quantised, "bfloat16") == "plain"
    assert choose_weight_form(quantised, requested="plain") == "plain"
    with pytest.raises(InvalidRequest, match=r"weights is q4, but .* has weights of type Q4_1"):
        choose_weight_form(quantised, requested="q4")
    plain = Checkpoint.open(tiny.write(tmp_path / "plain"))
    assert choose_weight_form(plain) == "plain" and choose_weight_form(plain, requested="q8") == "q8"
    with pytest.raises(InvalidRequest, match="weights is q8, but dtype is float32"):
        choose_weight_form(plain, "float32", "q8")
    with pytest.raises(InvalidRequest, match="weights is q4, which only the kernels of a CPU read"):
        check_requested_weights("q4", on_gpu=True)
    with pytest.raises(
        InvalidRequest, match="weights is packed, which only a GPU supports; on a CPU it must be auto, plain, q4, q8"
    ):
        check_requested_weights("packed", on_gpu=False)


def test_fingerprint_covers_values_and_types(tmp_path: Path) -> None:
    found = set()
    for number, quant in enumerate(["Q4_0", "Q4_1", "Q4_1"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        ggufs.write(folder / "m.gguf", quant=quant, values=make_values(seed=number))
        found.add(load_decoder(resolve_model(str(folder / "m.gguf"), folder / "cache")).fingerprint)
    assert len(found) == 3


def test_infos_have_the_sizes_of_the_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_model(tmp_path))
    infos = list(checkpoint.tensors.values())
    assert all(isinstance(info, GGUFTensorInfo) for info in infos)
    assert 0 < (tmp_path / "m.gguf").stat().st_size - sum(info.nbytes for info in infos) < 1 << 16


def test_weights_are_side_by_side_and_freed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_arena, "MAPPING_BYTES", 1 << 16)
    arena = WeightArena()
    first, second = arena.allocate(1000), arena.allocate(70)
    assert second.data_ptr() - first.data_ptr() == 1024 and len(second) == 70
    third = arena.allocate(1 << 16)  # does not fit beside them
    assert third.data_ptr() % 64 == 0 and len(arena.allocate(1 << 17)) == 1 << 17
    mapping = arena._mapping
    assert mapping is not None and mapping() is not None
    first.fill_(1), second.fill_(2), third.fill_(3)
    assert set(first.tolist()) == {1} and set(second.tolist()) == {2}
    del third
    assert mapping() is None
    assert len(arena.allocate(5)) == 5
