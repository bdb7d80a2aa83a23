"""DeviceWeights on a GPU: plain, decoded and packed tensors, reuse of buffers during copies, and sleep mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu_settings import gpu_config
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine import memory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.cpu.library import find_library
from emberline.kernels.cuda import uw12
from emberline.kernels.gpu_choice import has_hopper_kernels
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.models import coded_tensor_load, weight_uploader
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.pinned import allocate_host_bytes, pin, unpin
from emberline.models.reader import FileReader, weight_file_paths
from emberline.models.sleep import iter_instances, put_to_sleep
from emberline.models.tensor_names import IGNORABLE_TENSORS
from emberline.models.weights import Weights
from emberline.unweight import model as unweight
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.format import BLOCK_ELEMENTS

pytest_plugins = ("poison",)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poison"),
]

WIDE = {**tiny.CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1424, "vocab_size": 4099, "head_dim": 64}


EVEN = {**WIDE, "intermediate_size": 1408, "vocab_size": 4096}  # all can be packed
READS = (
    {"chunk_bytes": 4096 * 5, "ring": 2, "read_ahead_bytes": 1 << 20},
    {"chunk_bytes": 1 << 20, "ring": 4, "read_ahead_bytes": 0},
    {},
)


def pack_checkpoint(source: Path, target: Path) -> Path:
    unweight.pack_model(source, target, select_weight_codec(find_library()), lambda _: None)
    return target


def interleave(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.view(2, -1, 16, gate_up.shape[1])
    return torch.stack([gate, up], dim=1).reshape(gate_up.shape)


def load_all(weights: Weights, config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, ffn, out = config["hidden_size"], config["intermediate_size"], {}
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        qkv = [(f"{at}.self_attn.{name}_proj.weight", rows) for name, rows in (("q", q), ("k", kv), ("v", kv))]
        out[f"{at}.qkv"] = weights.stack(qkv, hidden)
        out[f"{at}.o"] = weights.load_matrix(f"{at}.self_attn.o_proj.weight", hidden, q)
        gate_up = [(f"{at}.mlp.{name}_proj.weight", ffn) for name in ("gate", "up")]
        out[f"{at}.gate_up"] = weights.stack(gate_up, hidden, gated=True)
        out[f"{at}.down"] = weights.load_matrix(f"{at}.mlp.down_proj.weight", hidden, ffn)
        norms = [(f"{at}.{name}.weight", hidden) for name in ("input_layernorm", "post_attention_layernorm")]
        out[f"{at}.norms"] = weights.stack_vectors(norms)
    out["embedding"] = weights.load_embedding_table("model.embed_tokens.weight", config["vocab_size"], hidden)
    out["head"] = weights.load_matrix("lm_head.weight", config["vocab_size"], hidden)
    out["norm"] = weights.load_vector("model.norm.weight", hidden)
    return out


@pytest.mark.parametrize("file", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_same_values_as_from_mapped_files(file: torch.dtype, dtype: torch.dtype | None, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path, WIDE, dtype=file, shards=3, seed=7))
    plain = Weights(checkpoint, dtype)
    expected = load_all(plain, WIDE)
    for options in READS:
        placed = DeviceWeights(checkpoint, dtype, "cuda", FileReader.start(weight_file_paths(checkpoint), **options))
        found = load_all(placed, WIDE)
        placed.finish("")
        assert placed.loaded_bytes == plain.loaded_bytes
        assert placed.load_times is not None and placed.load_times.read.bytes == sum(
            f.stat().st_size for f in weight_file_paths(checkpoint)
        )
        for name, tensor in found.items():
            wanted = expected[name]
            if name.endswith("gate_up"):
                wanted = interleave(wanted)
            assert tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == wanted.dtype
            assert torch.equal(tensor.cpu(), wanted), name


@pytest.mark.parametrize("run", [2 * BLOCK_ELEMENTS, coded_tensor_load.MAX_RUN_BYTES])
@pytest.mark.parametrize("file", [torch.float32, torch.float16, torch.bfloat16])
def test_loads_packed_files(file: torch.dtype, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write(tmp_path / "plain", WIDE, dtype=file, shards=3, seed=8)
    checkpoint = Checkpoint.open(pack_checkpoint(source, tmp_path / "packed"))
    expected = load_all(Weights(Checkpoint.open(source)), WIDE)
    monkeypatch.setattr(coded_tensor_load, "MAX_RUN_BYTES", run)
    monkeypatch.setattr(weight_uploader, "MAX_RUN_BYTES", max(run, 4 * BLOCK_ELEMENTS))
    for options in READS:
        placed = DeviceWeights(checkpoint, None, "cuda", FileReader.start(weight_file_paths(checkpoint), **options))
        found = load_all(placed, WIDE)
        placed.finish("")
        assert placed.load_times is not None and placed.load_times.decoded_bytes > 0
        for name, tensor in found.items():
            wanted = interleave(expected[name]) if name.endswith("gate_up") else expected[name]
            assert tensor.dtype == wanted.dtype and torch.equal(tensor.cpu(), wanted), name


def test_damaged_block_is_an_error(tmp_path: Path) -> None:
    """Another load works after the error."""
    directory = pack_checkpoint(tiny.write(tmp_path / "plain", WIDE, dtype=torch.bfloat16), tmp_path / "packed")
    info = Checkpoint.open(directory).tensor_info("lm_head.weight")
    for damaged in (True, False):
        data = bytearray(info.file.read_bytes())
        data[info.offset + info.nbytes // 2] ^= 1
        info.file.write_bytes(data)
        placed = DeviceWeights(Checkpoint.open(directory), None, "cuda")
        load_all(placed, WIDE)
        if damaged:
            with pytest.raises(ModelFileError, match="lm_head"):
                placed.finish("")
        else:
            placed.finish("")


@pytest.mark.parametrize("files", ["plain", "packed"])
def test_weights_kept_in_12_bits(files: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "plain", EVEN, dtype=torch.bfloat16, shards=3, seed=9)
    pack_checkpoint(tmp_path / "plain", tmp_path / "packed")
    checkpoint = Checkpoint.open(tmp_path / files)
    config = ModelConfig.from_hf(checkpoint.config)
    expected = load_all(Weights(Checkpoint.open(tmp_path / "plain")), EVEN)
    for options in READS:
        placed = DeviceWeights(
            checkpoint, None, "cuda", FileReader.start(weight_file_paths(checkpoint), **options), packed=True
        )
        decoder = DecoderModel.load(config, placed, 64, "")
        placed.finish(IGNORABLE_TENSORS)
        assert placed.loaded_bytes <= memory.weight_bytes(config, 2, packed=True)
        assert all(weight.layout is WeightLayout.UW12 for weight in iter_instances(PackedWeight, decoder))
        for i, layer in enumerate(decoder.layers):
            at, attention, ffn = f"model.layers.{i}", layer.attention, layer.ffn
            assert torch.equal(unpack_weight(attention.qkv.weight), expected[f"{at}.qkv"])
            assert torch.equal(unpack_weight(attention.o.weight), expected[f"{at}.o"])
            assert torch.equal(unpack_weight(ffn.gate_up.weight), interleave(expected[f"{at}.gate_up"]))  # type: ignore[attr-defined]
            assert torch.equal(unpack_weight(ffn.down.weight), expected[f"{at}.down"])  # type: ignore[attr-defined]
        assert torch.equal(unpack_weight(decoder.head.weight), expected["head"])
        assert isinstance(decoder.embedding, PackedWeight)
        assert torch.equal(unpack_weight(decoder.embedding), expected["embedding"])


def unpack_weight(weight: PackedWeight) -> Tensor:
    assert isinstance(weight.handle, uw12.UW12Weight)
    return uw12.unpack(weight.handle, torch.empty(weight.n, weight.k, dtype=torch.bfloat16, device="cuda")).cpu()


def test_packed_model_gives_same_tokens(tmp_path: Path) -> None:
    """Compare packed files, kept packed or not, with plain files."""
    from emberline.engine.gpu.boot import boot_from_checkpoint

    tiny.write(tmp_path / "plain", {**EVEN, "max_position_embeddings": 512}, dtype=torch.bfloat16, seed=10)
    pack_checkpoint(tmp_path / "plain", tmp_path / "packed")
    outputs: dict[tuple[str, str], list[int]] = {}
    ways = ("plain", "auto"), ("packed", "plain"), ("packed", "auto"), ("plain", "packed"), ("plain", "both")
    for files, weights in (*ways, ("packed", "both")):
        if weights == "both" and not has_hopper_kernels():
            continue
        settings = gpu_config(max_running=4, max_batch_tokens=256, kv_tokens=4096, weights=weights)
        booted = boot_from_checkpoint(tmp_path / files, settings)
        engine, tokens = booted.engine, list[int]()
        kept = [weight.layout is WeightLayout.UW12 for weight in iter_instances(PackedWeight, booted.runner.model)]
        assert all(kept) if (files, weights) in (("packed", "auto"), ("plain", "packed")) else not any(kept)
        twice = [weight.uw12_copy is not None for weight in iter_instances(PackedWeight, booted.runner.model)]
        assert all(twice) if weights == "both" else not any(twice)
        assert booted.runner.model.weight_bytes <= booted.plan.weights
        engine.add(Submission("r", list(range(3, 23)), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
        while not engine.idle:
            for output in engine.step():
                assert output.error is None
                tokens += output.tokens
        outputs[files, weights] = tokens
        del booted, engine
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1 and len(outputs["plain", "auto"]) == 20


def test_file_truncated_while_loading(tmp_path: Path) -> None:
    """The buffers are unpinned after the error: another load works."""
    for cut in (True, False):
        checkpoint = Checkpoint.open(tiny.write(tmp_path / str(cut), WIDE))
        placed = DeviceWeights(checkpoint, None, "cuda")
        load_all(placed, WIDE)
        if cut:
            with (tmp_path / str(cut) / "model.safetensors").open("r+b") as f:
                f.truncate(1 << 20)
            with pytest.raises(ModelFileError, match="does not contain all"):
                placed.finish("")
        else:
            placed.finish("")


def test_pinned_pages() -> None:
    memory = allocate_host_bytes(5_000_001)
    assert not memory.is_pinned()
    pin(memory)
    assert memory.is_pinned()
    unpin(memory)
    assert not memory.is_pinned()


def test_sleep_frees_device_memory() -> None:
    torch.cuda.empty_cache()
    whole = torch.randn(64 << 20, device="cuda")
    part, narrow = whole[1000:2000], torch.randn(32 << 20, device="cuda").to(torch.bfloat16)
    before = [t.cpu() for t in (whole, part, narrow)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    slept = put_to_sleep([part, narrow])
    asleep, _ = torch.cuda.mem_get_info()
    assert slept.nbytes == whole.nbytes + narrow.nbytes
    assert asleep - free >= slept.nbytes
    stranger = torch.full((1 << 20,), float("nan"), device="cuda")  # may take the old address
    slept.wake()
    assert stranger.isnan().all()
    for now, then in zip((whole, part, narrow), before, strict=True):
        assert torch.equal(now.cpu(), then)
    whole.fill_(2.0)
    assert (part == 2).all()
