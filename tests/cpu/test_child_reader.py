"""ChildProcessReader: the chunks it returns, its errors, and how its process ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from emberline.core.errors import ModelError, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.models import child_reader
from emberline.models import reader as reading
from emberline.models.child_reader import ChildProcessReader, start_reader
from emberline.models.config import ModelConfig
from emberline.models.device_weights import DeviceWeights
from emberline.models.reader import FileChunk, FileReader, weight_file_paths
from emberline.models.tensor_names import IGNORABLE_TENSORS
from emberline.models.weights import Weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def read_bytes(chunk: FileChunk) -> bytes:
    import ctypes

    out = ctypes.create_string_buffer(chunk.length)
    chunk.buffer.copy_to(ctypes.addressof(out), chunk.length)
    assert out.raw == bytes(chunk.buffer.memory[: chunk.length])
    return out.raw


def take_all_chunks(reader: FileReader) -> dict[tuple[str, int], bytes]:
    found: dict[tuple[str, int], bytes] = {}
    while (chunk := reader.next_chunk(20)) is not None:
        assert (chunk.file.name, chunk.offset) not in found, "read twice"
        found[chunk.file.name, chunk.offset] = read_bytes(chunk)
        reader.release_chunk(chunk)
    return found


def has_exited(process: int) -> bool:
    """Return whether a process has exited; a zombie counts."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_until(seconds: float, what: Any) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return bool(what())


@pytest.mark.parametrize(
    ("chunk_bytes", "ahead", "threads"), [(4096, 0, 1), (4096, 3 * 4096, 5), (3 << 20, 1 << 30, 4)]
)
def test_reads_every_byte_once(chunk_bytes: int, ahead: int, threads: int, tmp_path: Path) -> None:
    made = random.Random(1)
    sizes = [0, 1, 4095, 4096, 4097, 100_001, (3 << 20) + 5 if chunk_bytes > 4096 else 7]
    files = {f"{i}": made.randbytes(size) for i, size in enumerate(sizes)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = [tmp_path / name for name in files]
    with ChildProcessReader.spawn(paths, chunk_bytes=chunk_bytes, read_ahead_bytes=ahead, threads=threads) as reader:
        found = take_all_chunks(reader)
        assert reader.next_chunk() is None and reader.is_ready()
        assert reader.stats.bytes == sum(sizes) and reader.stats.seconds > 0
        reader.close()
        reader.close()
        assert reader.process.returncode is not None
    for name, data in files.items():
        assert b"".join(part for (file, _), part in sorted(found.items()) if file == name) == data


def test_child_waits_when_all_buffers_are_in_use(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(25 * 4096)
    (tmp_path / "file").write_bytes(data)
    with ChildProcessReader.spawn(
        [tmp_path / "file"], chunk_bytes=4096, read_ahead_bytes=3 * 4096, threads=2
    ) as reader:
        held = [reader.next_chunk(20) for _ in range(3)]
        time.sleep(0.2)
        assert reader.stats.bytes == 3 * 4096 and not reader.is_ready()
        with pytest.raises(ModelFileError, match="no data from the disk"):
            reader.next_chunk(0.05)
        found = {}
        for chunk in held:
            assert chunk is not None
            found[chunk.offset] = read_bytes(chunk)
            reader.release_chunk(chunk)
        found |= {offset: part for (_, offset), part in take_all_chunks(reader).items()}
    assert b"".join(found[offset] for offset in sorted(found)) == data


def test_weights_are_read_after_the_prefetch(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    first = [(str(tmp_path / "file"), 0, 8192), (str(tmp_path / "gone"), 0, 5)]
    with ChildProcessReader.spawn([tmp_path / "file"], chunk_bytes=4096, prefetch=first) as reader:
        time.sleep(0.2)
        assert reader.stats.bytes == 0
        assert reader.wait_for_prefetch(10)
        assert wait_until(10, lambda: reader.stats.bytes == 8192)  # without a call of take


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ahead", [4096, 1 << 30])
def test_loads_weights_through_child(dtype: torch.dtype | None, ahead: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path, shards=3))
    config = ModelConfig.from_hf(checkpoint.config)
    reader = ChildProcessReader.spawn(weight_file_paths(checkpoint), chunk_bytes=4096, read_ahead_bytes=ahead)
    placed = DeviceWeights(checkpoint, dtype, "cpu", reader)
    plain = Weights(checkpoint, dtype)
    pairs = []
    for name in [name for name in checkpoint.tensor_names() if len(checkpoint.tensor_info(name).shape) == 2]:
        rows, columns = checkpoint.tensor_info(name).shape
        pairs.append((placed.load_matrix(name, rows, columns), plain.load_matrix(name, rows, columns)))
        pairs[-1][0].fill_(float("nan"))
    for name in [name for name in checkpoint.tensor_names() if len(checkpoint.tensor_info(name).shape) == 1]:
        pairs.append((placed.load_vector(name, config.hidden), plain.load_vector(name, config.hidden)))
        pairs[-1][0].fill_(float("nan"))
    placed.finish(IGNORABLE_TENSORS)
    assert pairs and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert reader.process.returncode is not None


def test_child_errors_equal_those_of_threads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(40_000))
    with ChildProcessReader.spawn([file], chunk_bytes=4096, read_ahead_bytes=0) as reader:
        os.truncate(file, 9000)
        with pytest.raises(ModelFileError, match="ended at byte 9000 of 40000") as raised:
            take_all_chunks(reader)
        assert raised.value.hint == "download the file again"
        with pytest.raises(ModelFileError, match="ended at byte"):
            reader.next_chunk(5)
    with ChildProcessReader.spawn([file], chunk_bytes=4096) as reader:
        file.unlink()
        with pytest.raises(ModelFileError, match=r"cannot read .*file: No such file"):
            reader.next_chunk(20)
    with pytest.raises(ModelFileError, match="missing"):
        ChildProcessReader.spawn([tmp_path / "missing"])


def test_killed_child_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(40_000))
    with ChildProcessReader.spawn([tmp_path / "file"], chunk_bytes=4096, read_ahead_bytes=4096) as reader:
        chunk = reader.next_chunk(20)
        assert chunk is not None
        os.kill(reader.process.pid, signal.SIGKILL)
        reader.process.wait(10)
        with pytest.raises(ModelError, match="cannot copy weights"):
            read_bytes(chunk)
        reader.release_chunk(chunk)
        with pytest.raises(ModelError, match="has ended"):
            reader.next_chunk(20)


def test_stopped_child_times_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(40_000))
    with ChildProcessReader.spawn([tmp_path / "file"], chunk_bytes=4096) as reader:
        os.kill(reader.process.pid, signal.SIGSTOP)
        with pytest.raises(ModelFileError, match="no data from the disk"):
            reader.next_chunk(0.05)
    assert has_exited(reader.process.pid)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit", "reader.next_chunk(20)"])
def test_child_exits_with_its_parent(end: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(40_000))
    code = f"""
import os
from pathlib import Path
from emberline.models.child_reader import ChildProcessReader
reader = ChildProcessReader.spawn([Path({str(tmp_path / "file")!r})], chunk_bytes=4096, read_ahead_bytes=0)
print(reader.process.pid, flush=True)
reader.wait_for_prefetch(1)
{end}
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(reading.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert wait_until(10, lambda: has_exited(int(done.stdout)))


def test_falls_back_to_threads_without_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(40_000))

    def kind() -> type[FileReader]:
        with start_reader([tmp_path / "file"]) as reader:
            assert len(take_all_chunks(reader)) == 1
            return type(reader)

    assert kind() is FileReader  # the files are too small for a child process
    monkeypatch.setattr(child_reader, "MIN_CHILD_READ_BYTES", 40_000)
    assert kind() is ChildProcessReader
    real = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert kind() is FileReader
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert kind() is FileReader
    monkeypatch.setattr(sys, "executable", real)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(child_reader, "_copy_from_process", refuse)
    assert kind() is FileReader
    with pytest.raises(ModelFileError, match="missing"):
        start_reader([tmp_path / "missing"])
