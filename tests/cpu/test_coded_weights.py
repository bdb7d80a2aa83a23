"""DeviceWeights of packed checkpoints, with the CPU as the device: every tensor equals that of the CPU's loader."""

from __future__ import annotations

import gc
import random
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from gpu_settings import gpu_config
from safetensors.torch import save_file
from test_device_weights import SMALL, LateStream, interleave, load_all, load_both_ways, start_child_reader
from torch import Tensor

from emberline.bench.gpu import cold
from emberline.bench.gpu.model import write_checkpoint
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, ModelFileError, UnsupportedModel
from emberline.engine import memory
from emberline.engine.engine_group_boot import WeightEstimate, plan_time_sharing
from emberline.engine.gpu import boot
from emberline.engine.gpu.rank_role import RankRole
from emberline.engine.gpu.zero_weights import make_zero_weight_model
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kernels.cpu.library import find_library
from emberline.kernels.packed_weight import PackedWeight, WeightLayout
from emberline.kernels.uw12_ref import reference_pack
from emberline.kv.layer_groups import LayerGroups
from emberline.models import coded_tensor_load, weight_uploader
from emberline.models.coded_tensor_load import CheckedTensorLoad, CodedTensorLoad, combine_crc32
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.reader import FileReader, weight_file_paths
from emberline.models.sleep import iter_instances
from emberline.models.tensor_load import TensorLoad, TensorPlacement
from emberline.models.tensor_names import IGNORABLE_TENSORS
from emberline.models.weight_dtype import choose_weight_dtype
from emberline.models.weights import Weights
from emberline.unweight import model
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.format import BLOCK_ELEMENTS, count_blocks
from emberline.unweight.numpy_codec import NumpyWeightCodec
from emberline.unweight.tensor import CodedTensor, is_coded

CODEC = select_weight_codec(find_library())
LARGER = tiny.config("llama", vocab_size=301, hidden_size=96, intermediate_size=208, num_attention_heads=12)
TIED = {**LARGER, "tie_word_embeddings": True}
MANY = tiny.config("llama", vocab_size=2500, hidden_size=128, intermediate_size=1040, num_hidden_layers=1)
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BF16 = torch.bfloat16

pytest_plugins = ("poison",)
pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith(("reader", "mover", "codec", "warm-up"))]
    assert not left


def pack_checkpoint(source: Path, target: Path) -> Path:
    model.pack_model(source, target, CODEC, lambda _: None)
    assert any(is_coded(info) for info in Checkpoint.open(target).tensors.values())
    return target


def write_tensors(directory: Path, config: tiny.Config | str = LARGER, **options: Any) -> Path:
    return pack_checkpoint(tiny.write(directory / "plain", config, **options), directory / "packed")


def assert_same_as_unpacked(directory: Path, dtype: torch.dtype | None = None, **options: Any) -> DeviceWeights:
    """Compare with the packed files as the CPU reads them, and with the original files."""
    _, placed = load_both_ways(directory / "packed", dtype, **options)
    checkpoint = Checkpoint.open(directory / "plain")
    config = ModelConfig.from_hf(checkpoint.config)
    expected = load_all(Weights(checkpoint, dtype), config)
    again = DeviceWeights(Checkpoint.open(directory / "packed"), dtype, "cpu")
    found = load_all(again, config)
    again.finish(IGNORABLE_TENSORS)
    for name, tensor in found.items():
        assert torch.equal(tensor, interleave(expected[name]) if name.endswith("gate_up") else expected[name]), name
    return placed


@pytest.mark.parametrize("file", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float32, BF16], ids=str)
def test_loads_every_dtype_smaller_than_a_block(file: torch.dtype, dtype: torch.dtype | None, tmp_path: Path) -> None:
    write_tensors(tmp_path, dtype=file, shards=2)
    placed = assert_same_as_unpacked(tmp_path, dtype)
    assert (
        placed.load_times is not None and placed.load_times.decoded_bytes > 0 and placed.load_times.decode_seconds > 0
    )
    assert "decoded" in str(placed.load_times)


@pytest.mark.parametrize("file", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("chunk_bytes", [4096, 3 * 4096, 1 << 17, 1 << 20])
def test_blocks_split_across_chunks(file: torch.dtype, chunk_bytes: int, tmp_path: Path) -> None:
    write_tensors(tmp_path, MANY, dtype=file)
    info = Checkpoint.open(tmp_path / "packed").tensor_info(EMBEDDING)
    assert count_blocks(info.logical_bytes // file.itemsize) > 4
    assert_same_as_unpacked(tmp_path, chunk_bytes=chunk_bytes, ring=2)


def test_runs_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensors(tmp_path, MANY, dtype=BF16)
    for run in (1, 2 * BLOCK_ELEMENTS, 3 * 2 * BLOCK_ELEMENTS):  # a run has at least one block
        monkeypatch.setattr(coded_tensor_load, "MAX_RUN_BYTES", run)
        monkeypatch.setattr(weight_uploader, "MAX_RUN_BYTES", max(run, 2 * BLOCK_ELEMENTS))
        assert_same_as_unpacked(tmp_path, chunk_bytes=1 << 20)


@pytest.mark.parametrize("name", ["llama-tied-mha", "llama-biased", "qwen2", "qwen3"])
def test_loads_other_architectures(name: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 201, "hidden_size": 96, "intermediate_size": 208}
    write_tensors(tmp_path, tiny.CONFIGS[name] | sizes, dtype=BF16, shards=3)
    assert_same_as_unpacked(tmp_path)


def test_mixed_dtypes_and_tensors_that_stay_raw(tmp_path: Path) -> None:
    tensors = tiny.tensors(LARGER, dtype=BF16)
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, (301, 96), np.uint16).view(np.int16))
    tensors[HEAD] = torch.where(noise.view(BF16).isfinite(), noise.view(BF16), 1.0)
    tensors = {n: t.float() if "k_proj" in n or "up_proj" in n else t for n, t in tensors.items()}
    pack_checkpoint(tiny.write_tensors(tmp_path / "plain", LARGER, tensors), tmp_path / "packed")
    assert not is_coded(Checkpoint.open(tmp_path / "packed").tensor_info(HEAD))
    assert_same_stack_as_unpacked(tmp_path)


def assert_same_stack_as_unpacked(directory: Path) -> None:
    """Compare with DeviceWeights of plain files: the CPU's loader cannot stack several dtypes."""
    found = []
    for name in ("plain", "packed"):
        checkpoint = Checkpoint.open(directory / name)
        placed = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
        found.append(load_all(placed, ModelConfig.from_hf(checkpoint.config)))
        placed.finish(IGNORABLE_TENSORS)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_head_equal_to_embedding_is_dropped(tmp_path: Path) -> None:
    tensors = tiny.tensors(TIED, dtype=BF16)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    directory = pack_checkpoint(tiny.write_tensors(tmp_path / "plain", TIED, tensors), tmp_path / "packed")
    placed = DeviceWeights(Checkpoint.open(directory), None, "cpu")
    assert placed.drop_duplicate(HEAD, EMBEDDING, 301, 96) and not placed.has_tensor(HEAD)
    config = ModelConfig.from_hf(placed.checkpoint.config)
    found = load_all(placed, config)
    placed.finish(IGNORABLE_TENSORS)
    assert torch.equal(found["embedding"], tensors[EMBEDDING])


@pytest.mark.parametrize("chance", [1.0, 0.3])
def test_copies_that_finish_late(chance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode buffer is not reused while the device still reads it."""
    write_tensors(tmp_path, MANY, dtype=BF16, shards=2)
    monkeypatch.setattr(coded_tensor_load, "MAX_RUN_BYTES", 2 * BLOCK_ELEMENTS)
    monkeypatch.setattr(weight_uploader, "MAX_RUN_BYTES", 2 * BLOCK_ELEMENTS)
    monkeypatch.setattr(weight_uploader, "DECODE_SLOTS", 3)
    stream = LateStream(monkeypatch, chance)
    for start, ring, ahead in ((FileReader.start, 1, 0), (FileReader.start, 3, 1 << 18), (start_child_reader, 3, 0)):
        load_both_ways(tmp_path / "packed", start=start, ring=ring, read_ahead_bytes=ahead, chunk_bytes=1 << 16)
        assert not stream.pinned and not stream._queue
        assert 1 <= stream.most_pinned <= ring + weight_uploader.STAGING_SLOTS + weight_uploader.DECODE_SLOTS
        stream.most_pinned = 0


def test_loads_without_a_compiler(tmp_path: Path) -> None:
    write_tensors(tmp_path, LARGER | {"num_hidden_layers": 1}, dtype=BF16)  # decoded by numpy, which is slow
    ops.start_backend(native=False)
    try:
        assert isinstance(select_weight_codec(ops.current_backend().library), NumpyWeightCodec)
        assert_same_as_unpacked(tmp_path)
    finally:
        ops.start_backend()


def make_loads(directory: Path) -> tuple[CodedTensorLoad, Tensor, bytes]:
    info = Checkpoint.open(directory / "packed").tensor_info(EMBEDDING)
    place = torch.empty(info.shape, dtype=BF16)
    stored = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    return CodedTensorLoad(TensorPlacement(EMBEDDING, info, BF16, place), CODEC), place, stored


def test_bytes_may_arrive_in_any_order(tmp_path: Path) -> None:
    """Also with the index last; each block is decoded once."""
    write_tensors(tmp_path, MANY, dtype=BF16)
    expected = tiny.tensors(MANY, dtype=BF16)[EMBEDDING]
    made = random.Random(1)
    for trial in range(30):
        arrival, place, stored = make_loads(tmp_path)
        cuts = sorted(made.sample(range(1, len(stored)), made.choice([0, 1, 5, 60])))
        if trial % 3 == 0:  # split at block boundaries
            all_of_it = np.frombuffer(stored, np.uint8)
            whole = CodedTensor.open(EMBEDDING, arrival._info, lambda begin, end, of=all_of_it: of[begin:end], CODEC)
            cuts = sorted({*cuts, *made.sample(whole.block_starts.tolist(), 3)})
        parts = [(a, stored[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stored)], strict=True)]
        made.shuffle(parts)
        out, blocks = np.empty(coded_tensor_load.MAX_RUN_BYTES, np.uint8), []
        for at, part in parts:
            memory = np.frombuffer(part, np.uint8).copy()
            for run in arrival.add_coded_bytes(at, memory):
                begin, end = run.decode(out)
                arrival.copy_part(begin, torch.from_numpy(out[: end - begin]))
                blocks += range(run.first, run.last)
            memory[:] = 255  # kept bytes must be copies
        assert sorted(blocks) == list(range(count_blocks(place.numel()))) and arrival.remaining_bytes == 0
        assert torch.equal(place, expected) and not arrival._partial_blocks and not arrival._early_parts


def test_combined_crc32_of_parts() -> None:
    made = random.Random(2)
    for size in (1, 2, 5, 1000, 70_001):
        data = made.randbytes(size)
        cuts = sorted(made.sample(range(1, size), min(size - 1, made.choice([0, 1, 7]))))
        parts = [(a, b - a, zlib.crc32(data[a:b])) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        made.shuffle(parts)
        assert combine_crc32(parts) == zlib.crc32(data)
        assert combine_crc32([(at, length, crc ^ 1) for at, length, crc in parts]) != zlib.crc32(data)


def flip_bit(directory: Path, name: str, where: Callable[[int], int]) -> None:
    info = Checkpoint.open(directory).tensor_info(name)
    data = bytearray(info.file.read_bytes())
    data[info.offset + where(info.nbytes)] ^= 1
    info.file.write_bytes(data)


@pytest.mark.parametrize("name", [EMBEDDING, NORM, "model.layers.0.mlp.gate_proj.weight"])
@pytest.mark.parametrize(
    "where", [lambda n: 0, lambda n: 9, lambda n: n // 2, lambda n: n - 70], ids=["0", "9", "/", "-"]
)
def test_damage_gives_the_same_error_as_on_cpu(name: str, where: Callable[[int], int], tmp_path: Path) -> None:
    directory = write_tensors(tmp_path, MANY, dtype=BF16)
    flip_bit(directory, name, where)
    checkpoint = Checkpoint.open(directory)
    config, errors = ModelConfig.from_hf(checkpoint.config), []
    device = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
    for source in (Weights(checkpoint), device):
        with pytest.raises(ModelFileError, match=name) as refused:
            load_all(source, config)
            source.finish(IGNORABLE_TENSORS)
        errors.append((str(refused.value), refused.value.hint))
    assert errors[0] == errors[1] and "is damaged" in errors[0][0]


def test_pages_are_unpinned_after_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tensors(tmp_path, MANY, dtype=BF16)
    flip_bit(directory, EMBEDDING, lambda n: n // 2)
    stream = LateStream(monkeypatch, 0.5)
    checkpoint = Checkpoint.open(directory)
    placed = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
    load_all(placed, ModelConfig.from_hf(checkpoint.config))
    with pytest.raises(ModelFileError, match="block"):
        placed.finish(IGNORABLE_TENSORS)
    assert stream.most_pinned and not stream.pinned


def test_interrupt_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(write_tensors(tmp_path, MANY, dtype=BF16))
    taken, take = [], FileReader.next_chunk

    def interrupt(self: FileReader, *arguments: Any) -> Any:
        taken.append(1)
        if len(taken) == 40:
            raise KeyboardInterrupt
        return take(self, *arguments)

    monkeypatch.setattr(FileReader, "next_chunk", interrupt)
    placed = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
    load_all(placed, ModelConfig.from_hf(checkpoint.config))
    before = {t.name for t in threading.enumerate()}
    with pytest.raises(KeyboardInterrupt):
        placed.finish(IGNORABLE_TENSORS)
    assert "reader" in {name.split("_")[0] for name in before}
    assert not [t for t in threading.enumerate() if t.name.startswith(("reader", "mover", "decoder"))]


def test_file_truncated_while_read(tmp_path: Path) -> None:
    directory = write_tensors(tmp_path, MANY, dtype=BF16)
    checkpoint = Checkpoint.open(directory)
    placed = DeviceWeights(
        checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **(SMALL | {"ring": 1}))
    )
    load_all(placed, ModelConfig.from_hf(checkpoint.config))
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ModelFileError, match="ended at byte"):
        placed.finish(IGNORABLE_TENSORS)


def test_unsupported_dtype_is_refused(tmp_path: Path) -> None:
    tensors = tiny.tensors(LARGER, dtype=BF16)
    tensors[EMBEDDING] = (tensors[EMBEDDING].float() * 100).to(torch.float8_e4m3fn)
    directory = pack_checkpoint(tiny.write_tensors(tmp_path / "plain", LARGER, tensors), tmp_path / "packed")
    for device in ("cpu", "cuda"):
        placed = DeviceWeights(Checkpoint.open(directory), None, "cpu")
        placed.device = torch.device(device)
        with pytest.raises(UnsupportedModel, match="F8_E4M3"):
            placed.load_matrix(EMBEDDING, 301, 96)


def test_device_weights_read_packed_files(tmp_path: Path) -> None:
    placed = DeviceWeights(Checkpoint.open(write_tensors(tmp_path, dtype=BF16)), None, "cpu")
    placed.device = torch.device("cuda")
    placed._check_tensor(EMBEDDING, (301, 96))
    kinds = [type(placed._make_load(n, i, torch.empty(1))) for n, i in placed.checkpoint.tensors.items()]
    assert set(kinds) == {CodedTensorLoad, CheckedTensorLoad}
    plain = DeviceWeights(Checkpoint.open(tmp_path / "plain"), None, "cpu")
    assert type(plain._make_load(NORM, plain.checkpoint.tensor_info(NORM), torch.empty(1))) is TensorLoad


@pytest.fixture
def record_settled_weights(monkeypatch: pytest.MonkeyPatch) -> list[PackedWeight]:
    """Record the weights passed to `ops.fill_weight`, which needs a GPU."""
    found: list[PackedWeight] = []

    def settle(empty: PackedWeight, values: Tensor) -> int:
        assert values.shape == (empty.n, empty.k) and not values.isnan().any() and empty.layout is WeightLayout.ROWS
        empty.data = values.clone()
        found.append(empty)
        return values.nbytes * 3 // 4

    monkeypatch.setattr(ops, "fill_weight", settle)
    return found


@pytest.mark.parametrize("late", [False, True])
def test_weights_kept_packed(
    late: bool, record_settled_weights: list[PackedWeight], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tensors(tmp_path, MANY, dtype=BF16, shards=2)
    if late:
        LateStream(monkeypatch, 0.5)
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_hf(checkpoint.config)
    expected = load_all(Weights(checkpoint), config)
    placed = DeviceWeights(
        checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL), packed=True
    )
    decoder = DecoderModel.load(config, placed, 64, "")
    placed.finish(IGNORABLE_TENSORS)
    attention, ffn, at = decoder.layers[0].attention, decoder.layers[0].ffn, "model.layers.0"
    found = {f"{at}.qkv": attention.qkv, f"{at}.o": attention.o, f"{at}.down": ffn.down, "head": decoder.head}
    found[f"{at}.gate_up"] = ffn.gate_up
    weights = {name: linear.weight for name, linear in found.items()}
    weights["embedding"] = decoder.embedding
    for name, weight in weights.items():
        wanted = interleave(expected[name]) if name.endswith("gate_up") else expected[name]
        assert torch.equal(weight.data, wanted), name
    assert {id(weight) for weight in weights.values()} == {id(weight) for weight in record_settled_weights}
    assert torch.equal(decoder.head.norm, expected["norm"])
    vectors = sum(t.nbytes for name, t in expected.items() if "norm" in name)
    assert placed.loaded_bytes == vectors + sum(weight.data.nbytes * 3 // 4 for weight in weights.values())


def test_stand_in_weights_while_loading(record_settled_weights: list[PackedWeight], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tensors(tmp_path, TIED, dtype=BF16))
    placed = DeviceWeights(checkpoint, None, "cpu", packed=True)
    decoder = DecoderModel.load(ModelConfig.from_hf(checkpoint.config), placed, 64, "")
    other = make_zero_weight_model(decoder)
    assert len(record_settled_weights) == 5 and all(
        not weight.data.any() for weight in record_settled_weights
    )  # one of each shape
    first, last = other.layers[0], other.layers[-1]
    assert first.attention.qkv.weight is last.attention.qkv.weight and first.attention.qkv.norm is not None
    assert first.attention.qkv.norm is decoder.layers[0].attention.qkv.norm
    assert other.embedding is other.head.weight and other.embedding is not decoder.embedding
    assert first.ffn.gate_up.weight.gated and other.config is decoder.config
    assert not decoder.head.weight.data.numel()  # the model itself is unchanged
    gone = weakref.ref(other.head.weight.data)
    gc.disable()  # a started server freezes the garbage collector, with the same effect
    try:
        record_settled_weights.clear()
        del other, first, last
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kept", [True, False])
def test_warm_up_while_loading(
    kept: bool, record_settled_weights: list[PackedWeight], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(write_tensors(tmp_path, dtype=BF16))
    placed = DeviceWeights(checkpoint, None, "cpu", packed=kept)
    model = DecoderModel.load(ModelConfig.from_hf(checkpoint.config), placed, 64, "")
    rank = RankRole.single(model.config, LayerGroups.single(model.config.layers), 0)
    runner, seen = SimpleNamespace(model=model, rank=rank), list[DecoderModel]()
    monkeypatch.setattr(boot, "compile_kernels", lambda runner, quantised, *, packed: 0.0)
    monkeypatch.setattr(boot, "warm_up", lambda runner: seen.append(runner.model) or 1.5)
    seconds = boot._load_weights(placed, runner)  # type: ignore[arg-type]
    assert seconds["warm_up"] == 1.5 and seconds["decode_threads"] > 0
    assert runner.model is model and (seen[0] is not model) is kept
    assert not kept or all(weight.data.numel() for weight in iter_instances(PackedWeight, model))


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 576), (192, 4096)])
def test_memory_plan_includes_packed_matrices(shape: tuple[int, int]) -> None:
    made = reference_pack((torch.randn(shape) * 0.02).to(BF16))
    assert made is not None
    assert made.nbytes <= memory.max_packed_bytes(*shape) < 2 * shape[0] * shape[1]


def test_memory_plan_counts_plain_weights() -> None:
    assert memory.max_packed_bytes(100, 64) == 2 * 100 * 64 and memory.max_packed_bytes(64, 100) == 2 * 64 * 100


def test_which_weights_are_packed(tmp_path: Path) -> None:
    write_tensors(tmp_path, dtype=BF16)
    plain, ours = (Checkpoint.open(tmp_path / name) for name in ("plain", "packed"))
    for checkpoint, weights, dtype, answer in (
        (plain, "auto", "bfloat16", False),
        (plain, "packed", "bfloat16", True),
        (ours, "auto", "bfloat16", True),
        (ours, "auto", "float32", False),
        (ours, "plain", "bfloat16", False),
        (ours, "both", "bfloat16", False),
    ):
        assert memory.uses_packed_weights(checkpoint, gpu_config(weights=weights), dtype) is answer
    for weights in ("packed", "both"):
        with pytest.raises(InvalidRequest, match=f"weights is {weights}; only bfloat16"):
            memory.uses_packed_weights(ours, gpu_config(weights=weights), "float32")
    assert choose_weight_dtype(ours, on_gpu=True) == "bfloat16"
    assert choose_weight_dtype(ours, "float32", on_gpu=True) == "float32"


def test_several_models_share_memory_as_packed(tmp_path: Path) -> None:
    config = tiny.config("llama", vocab_size=128, hidden_size=64, intermediate_size=128, head_dim=32)
    tensors = tiny.tensors(config, dtype=BF16)
    pack_checkpoint(tiny.write_tensors(tmp_path / "plain", config, tensors), tmp_path / "packed")
    wide = {name: t.float() if "k_proj" in name else t for name, t in tensors.items()}
    tiny.write_tensors(tmp_path / "wide", config, wide)
    shape = ModelConfig.from_hf(config)
    for name, device, dtype, ours in (
        ("plain", "cuda", "bfloat16", False),
        ("packed", "cuda", "bfloat16", True),
        ("packed", "cpu", "bfloat16", False),
        ("wide", "cuda", "float32", False),
    ):
        found = WeightEstimate.from_config(EngineConfig.build(str(tmp_path / name), device=device))
        size = memory.weight_bytes(shape, memory.DTYPE_BYTES[dtype], packed=ours)
        assert (found.dtype, found.is_packed, found.weight_bytes) == (dtype, ours, size)
    configs = {name: EngineConfig.build(str(tmp_path / name), device="cuda") for name in ("plain", "packed")}
    members, _ = plan_time_sharing(configs, 40 << 30, 0, lambda name, settings: pytest.fail("nothing is loaded yet"))
    plans = [
        memory.plan_engine_memory(shape, gpu_config(), 40 << 30, "bfloat16", packed=ours) for ours in (False, True)
    ]
    saved = plans[0].fixed_bytes - plans[1].fixed_bytes
    assert members["plain"].nbytes - members["packed"].nbytes == pytest.approx(saved, abs=1 << 20)


def test_bench_packs_its_random_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_run_child", lambda action, where, *_: done.append(action) or acts[action](where))
    acts: dict[str, Callable[[Path], Any]] = {
        "write": lambda where: write_checkpoint(where, LARGER, device="cpu", shards=2) or {},
        "pack": cold.write_packed_checkpoint,
    }
    done: list[str] = []
    report, plain = BenchReport("cold"), tmp_path / "model"
    assert cold._ensure_checkpoint(report, plain, packed=False) == plain and done == ["write"]
    target = cold._ensure_checkpoint(report, plain, packed=True)
    assert done == ["write", "pack"] and target == tmp_path / "model-packed"
    assert cold._ensure_checkpoint(report, plain, packed=True) == target and done == ["write", "pack"]
    assert report.config["codec"] == CODEC.name and report.config["pack_s"] > 0
    assert model.verify_model(target, plain, CODEC, lambda _: None) == []


def test_coded_vectors_load(tmp_path: Path) -> None:
    """The format allows it, although our writer stores vectors raw."""
    whole = (torch.randn(200, 64) * 0.1).to(BF16)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    save_file({"bias": whole}, tmp_path / "plain" / "model.safetensors")
    checkpoint = Checkpoint.open(pack_checkpoint(tmp_path / "plain", tmp_path / "packed"))
    info = checkpoint.tensors["bias"]
    checkpoint.tensors["bias"] = type(info)(info.dtype, (12800,), info.file, info.offset, info.nbytes, info.packing)
    placed = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
    found = placed.load_vector("bias", 12800)
    placed.finish("")
    assert is_coded(info) and torch.equal(found, whole.flatten().float())
