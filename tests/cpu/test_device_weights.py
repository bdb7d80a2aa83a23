"""DeviceWeights, FileReader and sleep mode, with the CPU as the device."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_families
import torch
from torch import Tensor

from emberline.core.errors import EmberlineError, ModelFileError, UnsupportedModel
from emberline.engine.memory import weight_bytes
from emberline.hub.checkpoint import Checkpoint
from emberline.models import direct_io, tensor_load, weight_uploader
from emberline.models import reader as reading
from emberline.models.child_reader import ChildProcessReader
from emberline.models.config import ModelConfig
from emberline.models.device_weights import DeviceWeights
from emberline.models.layers import load_stacked_bias
from emberline.models.reader import FileReader, weight_file_paths
from emberline.models.sleep import put_to_sleep
from emberline.models.tensor_names import IGNORABLE_TENSORS
from emberline.models.weights import Weights

DTYPES = [None, torch.float32, torch.bfloat16]
SMALL = {"chunk_bytes": 4096, "ring": 3, "threads": 3, "read_ahead_bytes": 0}

pytest_plugins = ("poison",)
pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "reader"]


def load_stack(weights: Weights, names: list[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
    return weights.stack([(f"{name}.weight", rows) for name, rows in names], columns, gated=gated)


def load_all(weights: Weights, config: ModelConfig, *, gated: bool = True) -> dict[str, Tensor]:
    """Load everything that a decoder loads, in the same way."""
    q, kv, out = config.heads * config.head_dim, config.kv_heads * config.head_dim, {}
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        qkv = [(f"{at}.self_attn.{name}_proj", rows) for name, rows in (("q", q), ("k", kv), ("v", kv))]
        gate_up = [(f"{at}.mlp.{name}_proj", config.ffn) for name in ("gate", "up")]
        out[f"{at}.qkv"] = load_stack(weights, qkv, config.hidden)
        out[f"{at}.o"] = load_stack(weights, [(f"{at}.self_attn.o_proj", config.hidden)], q)
        out[f"{at}.gate_up"] = load_stack(weights, gate_up, config.hidden, gated=gated)
        out[f"{at}.down"] = load_stack(weights, [(f"{at}.mlp.down_proj", config.hidden)], config.ffn)
        if config.qkv_bias:
            out[f"{at}.qkv_bias"] = load_stacked_bias(weights, qkv)
        if config.o_bias:
            out[f"{at}.o_bias"] = load_stacked_bias(weights, [(f"{at}.self_attn.o_proj", config.hidden)])
        if config.mlp_bias:
            out[f"{at}.gate_up_bias"] = load_stacked_bias(weights, gate_up)
            out[f"{at}.down_bias"] = load_stacked_bias(weights, [(f"{at}.mlp.down_proj", config.hidden)])
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}.{name}"] = weights.load_vector(f"{at}.{name}.weight", config.hidden)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            out[f"{at}.{name}"] = weights.load_vector(f"{at}.self_attn.{name}.weight", config.head_dim)
    out["embedding"] = weights.load_embedding_table("model.embed_tokens.weight", config.vocab, config.hidden)
    out["norm"] = weights.load_vector("model.norm.weight", config.hidden)
    if weights.has_tensor("lm_head.weight"):
        out["head"] = weights.load_matrix("lm_head.weight", config.vocab, config.hidden)
    return out


def test_fused_matrices_and_norm_offsets(tmp_path: Path) -> None:
    """Gate and up rows of one tensor are interleaved as those of two; an offset is added to a norm."""
    checkpoint = Checkpoint.open(tiny_families.write(tmp_path, "phi3"))
    name, norm = "model.layers.0.mlp.gate_up_proj.weight", "model.norm.weight"
    names = {**checkpoint.tensors}
    placed, plain = DeviceWeights(checkpoint, torch.bfloat16, "cpu"), Weights(checkpoint)
    matrix, vector = placed.stack([(name, 160)], 48, gated=True), placed.load_vector(norm, 48, offset=1.0)
    others = [n for n in names if n != name and len(names[n].shape) == 2]
    whole = [placed.load_matrix(n, *names[n].shape) for n in others]
    placed.finish(r".*norm\.weight")
    assert torch.equal(matrix, interleave(plain.load_matrix(name, 160, 48).bfloat16())) and len(whole)
    assert torch.equal(vector, plain.load_vector(norm, 48) + 1.0)


def interleave(gate_up: Tensor) -> Tensor:
    """Interleave by definition: rows [32g, 32g + 16) are gate rows from 16g, the next 16 the same up rows."""
    ffn = len(gate_up) // 2
    if ffn % 16:
        return gate_up
    rows = [half * ffn + 16 * g + i for g in range(ffn // 16) for half in (0, 1) for i in range(16)]
    return gate_up[rows]


def start_child_reader(
    paths: list[Path], *, ring: int, chunk_bytes: int, read_ahead_bytes: int, threads: int
) -> FileReader:
    return ChildProcessReader.spawn(
        paths, chunk_bytes=chunk_bytes, read_ahead_bytes=ring * chunk_bytes + read_ahead_bytes, threads=threads
    )


def load_both_ways(
    directory: Path,
    dtype: torch.dtype | None = None,
    start: Callable[..., FileReader] = FileReader.start,
    **options: int,
) -> tuple[Weights, DeviceWeights]:
    """Compare every tensor of two sources."""
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_hf(checkpoint.config)
    plain = Weights(checkpoint, dtype)
    expected = load_all(plain, config)
    plain.finish(IGNORABLE_TENSORS)
    placed = DeviceWeights(checkpoint, dtype, "cpu", start(weight_file_paths(checkpoint), **(SMALL | options)))
    found = load_all(placed, config)
    placed.finish(IGNORABLE_TENSORS)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        wanted = interleave(expected[name]) if name.endswith("gate_up") else expected[name]
        assert tensor.dtype == wanted.dtype and tensor.is_contiguous(), name
        assert torch.equal(tensor, wanted), name
    assert placed.loaded_bytes == plain.loaded_bytes
    return plain, placed


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "llama-biased", "llama-odd-head", "qwen2", "qwen3"])
def test_same_values_as_from_mapped_files(name: str, tmp_path: Path) -> None:
    for shards in (1, 3):
        plain, _ = load_both_ways(tiny.write(tmp_path / str(shards), name, shards=shards))
        config = ModelConfig.from_hf(plain.checkpoint.config)
        assert weight_bytes(config, 4) == plain.loaded_bytes  # the memory plan counts the same


@pytest.mark.parametrize("file", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts(file: torch.dtype, dtype: torch.dtype | None, tmp_path: Path) -> None:
    load_both_ways(tiny.write(tmp_path, dtype=file), dtype)


def test_gate_and_up_that_do_not_divide_stay_separate(tmp_path: Path) -> None:
    for ffn in (72, 16, 8):
        load_both_ways(tiny.write(tmp_path / str(ffn), {**tiny.CONFIGS["llama"], "intermediate_size": ffn}))


def test_stack_of_different_dtypes(tmp_path: Path) -> None:
    tensors = tiny.tensors(tiny.CONFIGS["llama"])
    narrow = {n: t.to(torch.bfloat16) if "k_proj" in n or "up_proj" in n else t for n, t in tensors.items()}
    directory = tiny.write_tensors(tmp_path, tiny.CONFIGS["llama"], narrow)
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.from_hf(checkpoint.config)
    placed = DeviceWeights(checkpoint, None, "cpu")
    found, expected = load_all(placed, config), load_all(Weights(checkpoint), config)
    placed.finish(IGNORABLE_TENSORS)
    for name, tensor in found.items():
        assert torch.equal(tensor, interleave(expected[name]) if name.endswith("gate_up") else expected[name]), name


def test_any_ring_and_chunk_size(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, shards=2)
    for options in (
        {"ring": 1, "threads": 1},
        {"ring": 1, "threads": 8},
        {"ring": 2, "threads": 1, "read_ahead_bytes": 1 << 20},
        {"chunk_bytes": 3 * 4096, "read_ahead_bytes": 50_000},
        {"chunk_bytes": 1 << 20},
    ):
        load_both_ways(directory, **options)


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_at_odd_offsets(shift: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Elements may cross the boundary of two chunks."""
    file = tiny.write(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + shift).to_bytes(8, "little") + data[8 : 8 + length] + b" " * shift + data[8 + length :])
    load_both_ways(tmp_path, dtype)


class LateStream:
    """A fake CUDA stream that runs its copies later, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: float) -> None:
        self.device = None
        self.enqueued = self.done = 0
        self.pinned: set[int] = set()
        self.most_pinned = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._random, self._chance = random.Random(5), chance
        land, made, stream = tensor_load.TensorLoad.copy_part, weight_uploader.WeightUploader.__init__, self

        class Event:
            def record(self, _: Any) -> None:
                self.mark = stream.enqueued

            def query(self) -> bool:
                stream.go_on()
                return stream.done >= self.mark

        def later(one: Any, at: int, source: Tensor) -> None:
            stream.enqueued += 1
            stream._queue.append(lambda: land(one, at, source))

        def pin(memory: Tensor) -> None:
            assert memory.data_ptr() not in stream.pinned
            stream.pinned.add(memory.data_ptr())
            stream.most_pinned = max(stream.most_pinned, len(stream.pinned))

        monkeypatch.setattr(tensor_load.TensorLoad, "copy_part", later)
        monkeypatch.setattr(
            weight_uploader.WeightUploader, "__init__", lambda c, r, _: made(c, r, SimpleNamespace(type="cuda"))
        )
        monkeypatch.setattr(weight_uploader, "pin", pin)
        monkeypatch.setattr(weight_uploader, "unpin", lambda memory: stream.pinned.remove(memory.data_ptr()))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())

    def wait_stream(self, _: Any) -> None:
        pass

    def go_on(self) -> None:
        if self._queue and self._random.random() < self._chance:
            self._queue.popleft()()
            self.done += 1


@pytest.mark.parametrize("chance", [1.0, 0.5, 0.05])
def test_buffers_are_reused_only_after_their_copy(
    chance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.write(tmp_path, dtype=torch.bfloat16, shards=2)
    stream = LateStream(monkeypatch, chance)
    for ring, ahead, start in (
        (1, 0, FileReader.start),
        (3, 0, FileReader.start),
        (3, 100_000, FileReader.start),
        (3, 0, start_child_reader),
    ):
        load_both_ways(directory, start=start, ring=ring, read_ahead_bytes=ahead)
        assert not stream.pinned and not stream._queue
        # Buffers used once are not pinned: their content passes through a few pinned ones.
        assert 1 <= stream.most_pinned <= ring + weight_uploader.STAGING_SLOTS
        stream.most_pinned = 0


def test_pages_are_unpinned_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path))
    stream = LateStream(monkeypatch, 0.5)
    placed = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
    load_all(placed, ModelConfig.from_hf(checkpoint.config))
    os.truncate(tmp_path / "model.safetensors", 60_000)
    with pytest.raises(ModelFileError, match="ended at byte"):
        placed.finish(IGNORABLE_TENSORS)
    assert stream.most_pinned and not stream.pinned


def test_failed_copy_thread_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path, shards=2))
    stream = LateStream(monkeypatch, 0.5)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no more of this")

    monkeypatch.setattr(direct_io.ctypes, "memmove", refuse)
    reader = FileReader.start(weight_file_paths(checkpoint), **(SMALL | {"read_ahead_bytes": 1 << 20}))
    deadline = time.monotonic() + 30.0
    while len(reader._filled) <= SMALL["ring"] and time.monotonic() < deadline:
        time.sleep(0.01)  # until buffers that are used once exist, which the mover threads empty
    placed = DeviceWeights(checkpoint, None, "cpu", reader)
    load_all(placed, ModelConfig.from_hf(checkpoint.config))
    with pytest.raises(RuntimeError, match="no more of this"):
        placed.finish(IGNORABLE_TENSORS)
    assert not stream.pinned and not [t for t in threading.enumerate() if t.name.startswith("mover")]


def test_prefetched_ranges_are_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of other files are read before the weights; a missing file is ignored."""
    (tmp_path / "file").write_bytes(random.Random(6).randbytes(9000))
    (tmp_path / "library").write_bytes(bytes(3 * reading.PREFETCH_CALL_BYTES))
    log: list[tuple[int, int]] = []
    real = os.preadv

    def record_read(fd: int, buffers: Any, offset: int) -> int:
        log.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", record_read)
    library, size = str(tmp_path / "library"), reading.PREFETCH_CALL_BYTES
    first = [(library, 5, size + 7), (str(tmp_path / "gone"), 0, 100), (library, 0, 0), (library, 2 * size, 3 * size)]
    with FileReader.start(
        [tmp_path / "file"], chunk_bytes=4096, ring=2, threads=1, read_ahead_bytes=1 << 20, prefetch=first
    ) as reader:
        assert reader.wait_for_prefetch(10)
        assert len(take_all_chunks(reader)) == 3
    assert log[:4] == [(5, size), (5 + size, 2), (0, 0), (2 * size, size)]
    with FileReader.start([tmp_path / "file"], prefetch=first, threads=5) as reader:
        assert reader.wait_for_prefetch(10)
        assert len(take_all_chunks(reader)) == 1  # large enough that its pages are faulted in first


def test_only_ranges_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short range does not fill its buffer with what follows it in the file."""
    data, log, real = random.Random(7).randbytes(40 * 4096), [], os.preadv
    (tmp_path / "file").write_bytes(data)

    def record_read(fd: int, buffers: Any, offset: int) -> int:
        log.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", record_read)
    ranges = {tmp_path / "file": [(5, 100), (30 * 4096 + 1, 31 * 4096 + 2)]}
    with FileReader.start([tmp_path / "file"], chunk_bytes=1 << 20, threads=1, ranges=ranges) as reader:
        found = take_all_chunks(reader)
    assert found == {("file", 0): data[:4096], ("file", 30 * 4096): data[30 * 4096 : 32 * 4096]}
    assert {(offset, size) for offset, size in log if size} == {(0, 4096), (30 * 4096, 2 * 4096)}


def test_load_times_add_up(tmp_path: Path) -> None:
    _, placed = load_both_ways(tiny.write(tmp_path, shards=2))
    assert placed.load_times is not None
    read = placed.load_times.read
    assert read.bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0 <= read.direct_bytes <= read.bytes and read.seconds > 0 and read.gigabytes_per_second > 0
    assert "GB/s" in str(placed.load_times)


def test_head_beside_tied_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.models.weights.COMPARE_ELEMENTS", 500)
    config, name = tiny.CONFIGS["llama-tied-mha"], "model.embed_tokens.weight"

    def answer(change: Callable[[Tensor], Any], dtype: torch.dtype | None = None) -> bool:
        tensors = tiny.tensors(config)
        head = tensors[name].clone()
        change(head)
        checkpoint = Checkpoint.open(tiny.write_tensors(tmp_path, config, {**tensors, "lm_head.weight": head}))
        placed = DeviceWeights(checkpoint, dtype, "cpu")
        dropped = placed.drop_duplicate("lm_head.weight", name, 131, 48)
        assert placed.has_tensor("lm_head.weight") is not dropped
        return dropped

    assert answer(lambda head: None)
    assert not answer(lambda head: head[-1, -1].add_(1))
    assert not answer(lambda head: head[0, 0].add_(1))
    assert answer(lambda head: head.mul_(1 + 2**-20), torch.bfloat16) is (  # equal after rounding, or not
        torch.equal(
            tiny.tensors(config)[name].mul(1 + 2**-20).to(torch.bfloat16), tiny.tensors(config)[name].to(torch.bfloat16)
        )
    )


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), Q),
        (lambda t: t.update({Q: t[Q][:-1].clone()}), r"has the shape \(47, 48\); config.json requires \(48, 48\)"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), "has the unsupported dtype I8"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(80, 48)}), "does not use"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"][None].clone()}), "model.norm.weight"),
    ],
)
def test_same_errors_as_cpu_weights(change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
    tensors = tiny.tensors(tiny.CONFIGS["llama"])
    change(tensors)
    checkpoint = Checkpoint.open(tiny.write_tensors(tmp_path, tiny.CONFIGS["llama"], tensors))
    config = ModelConfig.from_hf(checkpoint.config)
    errors = []
    for source in (Weights(checkpoint), DeviceWeights(checkpoint, None, "cpu")):
        with pytest.raises((ModelFileError, UnsupportedModel), match=message) as refused:
            load_all(source, config)
            source.finish(IGNORABLE_TENSORS)
        errors.append((type(refused.value), str(refused.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("cut", [0, 1, 4096, 5000, -1])
def test_file_truncated_after_open(cut: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path))
    placed = DeviceWeights(checkpoint, None, "cpu")
    load_all(placed, ModelConfig.from_hf(checkpoint.config))
    file = tmp_path / "model.safetensors"
    os.truncate(file, cut if cut >= 0 else file.stat().st_size + cut)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        placed.finish(IGNORABLE_TENSORS)


def test_file_truncated_while_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(random.Random(0).randbytes(40_000))
    with FileReader.start([file], chunk_bytes=4096, ring=1, threads=2, read_ahead_bytes=0) as reader:
        first = reader.next_chunk()
        assert first is not None and first.offset == 0
        os.truncate(file, 9000)
        reader.release_chunk(first)
        with pytest.raises(ModelFileError, match="ended at byte 9000 of 40000"):
            while (chunk := reader.next_chunk(5)) is not None:
                reader.release_chunk(chunk)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="missing"):
        FileReader.start([tmp_path / "missing"])
    with FileReader.start([tmp_path], **SMALL) as reader, pytest.raises(ModelFileError, match="director"):
        while reader.next_chunk(5) is not None:
            pass


def take_all_chunks(reader: FileReader) -> dict[tuple[str, int], bytes]:
    found: dict[tuple[str, int], bytes] = {}
    while (chunk := reader.next_chunk(10)) is not None:
        assert (chunk.file.name, chunk.offset) not in found, "read twice"
        found[chunk.file.name, chunk.offset] = chunk.buffer.memory[: chunk.length]
        reader.release_chunk(chunk)
    return found


@pytest.mark.parametrize("direct", [True, False])
def test_reads_every_byte_once(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    made = random.Random(1)
    sizes = [0, 1, 4095, 4096, 4097, 12288, 100_001]
    files = {f"{i}": made.randbytes(size) for i, size in enumerate(sizes)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for chunk_bytes, ring, threads, ahead in ((4096, 1, 1, 0), (4096, 2, 5, 30_000), (8192, 9, 4, 1 << 20)):
        options = {"chunk_bytes": chunk_bytes, "ring": ring, "threads": threads, "read_ahead_bytes": ahead}
        with FileReader.start([tmp_path / name for name in files], **options) as reader:
            found = take_all_chunks(reader)
            assert reader.next_chunk() is None
            reader.close()
            with (tmp_path / "0").open() as other:
                reader.close()  # a second close must not close descriptors opened since
                os.fstat(other.fileno())
            assert reader.stats.bytes == sum(sizes)
            assert direct or reader.stats.direct_bytes == 0
        for name, data in files.items():
            parts = sorted((offset, part) for (file, offset), part in found.items() if file == name)
            assert b"".join(part for _, part in parts) == data


def test_rejected_direct_read_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(2).randbytes(4097)
    real = os.preadv

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        if len(buffers[0]) % 4096 == 0:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    (tmp_path / "odd").write_bytes(data)
    monkeypatch.setattr(os, "preadv", refuse)
    with FileReader.start([tmp_path / "odd"], chunk_bytes=8192, ring=2, threads=1, read_ahead_bytes=0) as reader:
        assert take_all_chunks(reader) == {("odd", 0): data}
        assert reader.stats.direct_bytes == 0


def test_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, real, made = random.Random(3).randbytes(60_000), os.preadv, random.Random(4)
    (tmp_path / "file").write_bytes(data)

    def short(fd: int, buffers: Any, offset: int) -> int:
        most = made.randrange(1, len(buffers[0]) + 1)
        most = most // 4096 * 4096 if most >= 4096 and made.random() < 0.7 else most
        with memoryview(buffers[0])[:most] as part:
            return real(fd, [part], offset)

    monkeypatch.setattr(os, "preadv", short)
    with FileReader.start([tmp_path / "file"], chunk_bytes=16384, ring=2, threads=1, read_ahead_bytes=0) as reader:
        found = take_all_chunks(reader)
    assert b"".join(found[key] for key in sorted(found)) == data


def test_reads_ahead_only_until_first_chunk_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100 * 4096))
    with FileReader.start(
        [tmp_path / "file"], chunk_bytes=4096, ring=2, threads=2, read_ahead_bytes=10 * 4096
    ) as reader:
        for _ in range(500):
            if reader.stats.bytes == 12 * 4096:
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.05)
        assert reader.stats.bytes == 12 * 4096  # the ring and the read-ahead, then reading stops
        numbers = []
        while (chunk := reader.next_chunk(10)) is not None:
            numbers.append(chunk.buffer.number)
            reader.release_chunk(chunk)
        assert len(numbers) == 100 and set(numbers) == set(range(12))
        assert sum(number >= 2 for number in numbers) == 10  # buffers beyond the ring are used once


def test_allocates_no_buffers_after_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(100 * 4096))
    turns, real = threading.Semaphore(1), os.preadv

    def in_turn(fd: int, buffers: Any, offset: int) -> int:
        turns.acquire(timeout=10)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", in_turn)
    with FileReader.start(
        [tmp_path / "file"], chunk_bytes=4096, ring=2, threads=1, read_ahead_bytes=50 * 4096
    ) as reader:
        first = reader.next_chunk(10)
        turns.release(100)
        threading.Event().wait(0.1)
        assert first is not None and reader.stats.bytes <= 2 * 4096
        reader.release_chunk(first)
        assert len(take_all_chunks(reader)) == 99


def test_stalled_disk_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    gate, real = threading.Event(), os.preadv

    def stuck(fd: int, buffers: Any, offset: int) -> int:
        gate.wait(10)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", stuck)
    with FileReader.start([tmp_path / "file"], **SMALL) as reader:
        with pytest.raises(ModelFileError, match="no data from the disk"):
            reader.next_chunk(0.05)
        reader.close(0.05)  # close does not wait for the disk either
        gate.set()


def test_thread_error_is_raised_to_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    for raised, seen in ((OSError(5, "Input/output error"), ModelFileError), (RuntimeError("a bug"), RuntimeError)):

        def fail(*_: Any, raised: Exception = raised) -> int:
            raise raised

        monkeypatch.setattr(os, "preadv", fail)
        with FileReader.start([tmp_path / "file"], **SMALL) as reader, pytest.raises(seen, match=r"error|bug"):
            reader.next_chunk(5)


def test_out_of_memory_for_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))

    def refuse(*_: Any) -> reading.ReadBuffer:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(reading, "ReadBuffer", refuse)
    with (
        FileReader.start([tmp_path / "file"], **SMALL) as reader,
        pytest.raises(EmberlineError, match="cannot allocate"),
    ):
        reader.next_chunk(5)


def test_invalid_model_closes_the_reader(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path))
    placed = DeviceWeights(checkpoint, None, "cpu", FileReader.start(weight_file_paths(checkpoint), **SMALL))
    with pytest.raises(ModelFileError, match="does not use"):
        placed.finish(IGNORABLE_TENSORS)


def test_reader_starts_without_torch(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, shards=2)
    code = f"""
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from pathlib import Path
from emberline.hub.checkpoint import Checkpoint
from emberline.models.reader import FileReader, weight_file_paths
import emberline.engine.memory
with FileReader.start(weight_file_paths(Checkpoint.open(Path({str(directory)!r})))) as reader:
    while (chunk := reader.next_chunk(10)) is not None:
        reader.release_chunk(chunk)
    print(reader.stats.bytes)
"""
    source = str(Path(reading.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def test_sleep_and_wake() -> None:
    base = torch.randn(1000)
    head, rows, alone = base[:100], base.view(10, 100)[3:7], torch.randint(0, 100, (7, 5), dtype=torch.int32)
    before = [t.clone() for t in (base, head, rows, alone)]
    slept = put_to_sleep([head, rows, alone, torch.empty(0)])
    assert slept.nbytes == base.nbytes + alone.nbytes  # shared memory counts once
    assert base.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
    slept.wake()
    for now, then in zip((base, head, rows, alone), before, strict=True):
        assert torch.equal(now, then)
    rows.fill_(1.0)
    assert (base[300:700] == 1).all()  # the views still share memory


def test_failed_wake_can_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(50) for _ in range(3)]
    before = [t.clone() for t in tensors]
    slept = put_to_sleep(tensors)
    full = slept._slept[1].storage

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(full, name)

        def resize_(self, size: int) -> None:
            raise RuntimeError("out of memory")

    object.__setattr__(slept._slept[1], "storage", Full())
    with pytest.raises(RuntimeError, match="out of memory"):
        slept.wake()
    object.__setattr__(slept._slept[1], "storage", full)
    slept.wake()
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
