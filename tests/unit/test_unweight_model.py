"""Packed models unpack to the original files, damage is an error, and an interrupted command leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import unweight_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_gguf import write_gguf
from safetensors import safe_open

from emberline.cli.__main__ import main
from emberline.core.config import kernel_dir
from emberline.core.errors import EmberlineError, InvalidRequest, ModelError, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.tensorfile import read_tensors
from emberline.kernels.cpu.library import find_library
from emberline.unweight import model
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.file import ModelFile
from emberline.unweight.tensor import CodedTensor, is_coded
from emberline.unweight.unpack import iter_verified_chunks

CODEC = select_weight_codec(find_library())
KINDS = {"embed", "odd", "wide", "half", "eight"}  # tensors that packing makes smaller


def ignore_progress(_: int) -> None:
    pass


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def tensors(path: Path) -> dict[str, bytes]:
    """Return the tensors as a loader reads them: checked by CRC-32, not by SHA-256."""
    file = ModelFile(path, CODEC)
    with ThreadPoolExecutor(1) as pool:
        return {name: b"".join(chunk.tobytes() for chunk in file.iter_chunks(name, pool)) for name in file.tensors}


@pytest.fixture
def packed_model(tmp_path: Path) -> Path:
    model.pack_model(unweight_models.write(tmp_path / "plain"), tmp_path / "packed", CODEC, ignore_progress)
    return tmp_path / "packed"


@pytest.mark.parametrize("shards", [1, 3])
def test_unpacking_gives_the_same_files(tmp_path: Path, shards: int) -> None:
    source = unweight_models.write(tmp_path / "plain", shards=shards)
    done: list[int] = []
    model.pack_model(source, tmp_path / "packed", CODEC, done.append)
    assert sum(done) == sum(info.nbytes for info in Checkpoint.open(source).tensors.values())
    assert model.verify_model(tmp_path / "packed", source, CODEC, ignore_progress) == []
    model.unpack_model(tmp_path / "packed", tmp_path / "again", CODEC, ignore_progress)
    assert contents(tmp_path / "again") == contents(source)
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "packed", "again"}


def test_checkpoint_describes_original_tensors(packed_model: Path) -> None:
    plain, ours = Checkpoint.open(packed_model.parent / "plain"), Checkpoint.open(packed_model)
    assert {n: (t.dtype, t.shape) for n, t in ours.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in plain.tensors.items()
    }
    assert {name for name, info in ours.tensors.items() if is_coded(info)} == KINDS
    assert all(ours.tensor_info(name).nbytes < plain.tensor_info(name).nbytes for name in KINDS)


def test_other_readers_see_coded_tensors_as_bytes(packed_model: Path) -> None:
    """A coded tensor is a vector of bytes, so no reader can mistake it for a matrix of weights."""
    with safe_open(packed_model / "model.safetensors", "np") as file:
        assert file.metadata()["format"] == "unweight"
        for name in KINDS:
            stored = file.get_tensor(name)
            assert stored.dtype == np.uint8 and stored.ndim == 1
        assert file.get_tensor("ids").tolist() == list(range(7))
        assert file.get_tensor("scale") == np.float32(1.5)


def test_tensors_are_aligned(packed_model: Path) -> None:
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}
    for info in read_tensors(packed_model / "model.safetensors").values():
        assert info.offset % (64 if is_coded(info) else sizes[info.dtype]) == 0


def test_blocks_decode_alone_from_parts_of_the_file(tmp_path: Path) -> None:
    source = unweight_models.write(tmp_path / "plain", rows=2000)  # four blocks
    model.pack_model(source, tmp_path / "packed", CODEC, ignore_progress)
    info = Checkpoint.open(tmp_path / "packed").tensor_info("embed")
    data = np.fromfile(info.file, np.uint8)[info.offset : info.offset + info.nbytes]
    tensor = CodedTensor.open("embed", info, lambda begin, end: data[begin:end], CODEC)
    assert tensor.num_blocks == 4 and tensor.block_starts[-1] <= info.nbytes
    whole = np.frombuffer(tensors(source / "model.safetensors")["embed"], np.uint8)
    for block in (2, 0, 3, 1):
        begin, end = tensor.decoded_span(block, block + 1)
        out = np.empty(end - begin, np.uint8)
        tensor.decode(data[tensor.block_starts[block] : tensor.block_starts[block + 1]].copy(), block, block + 1, out)
        assert np.array_equal(out, whole[begin:end])
    for begin, end in ((0, 0), (0, 1), (131_071, 131_073), (262_140, 400_000), (len(whole) - 5, len(whole))):
        assert np.array_equal(tensor.read(lambda a, b: data[a:b], begin, end), whole[begin:end])


def test_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts in one tensor of three dimensions or in one matrix each: packed, unpacked and read separately."""
    random = np.random.default_rng(5)
    experts = np.stack(
        [unweight_models.bf16(random, 400, 256) + np.uint16(i << 7) for i in range(6)]
    )  # of 2^i times the size
    experts[4, 7, :5] = (0x7FC1, 0xFF80, 0x8000, 0x0001, 0x7F7F)
    found = {"mlp.experts.down_proj": experts} | {f"mlp.experts.{i}.w1.weight": e for i, e in enumerate(experts)}
    source = unweight_models.save(tmp_path / "plain", found)
    assert main(["unweight", "pack", str(source), str(tmp_path / "packed"), "--quiet"]) == 0
    assert main(["unweight", "verify", str(source), str(tmp_path / "packed"), "--quiet"]) == 0
    assert main(["unweight", "unpack", str(tmp_path / "packed"), str(tmp_path / "again"), "--quiet"]) == 0
    assert contents(tmp_path / "again") == contents(source)
    capsys.readouterr()
    assert main(["unweight", "info", str(tmp_path / "packed")]) == 0
    assert "6 x 400 x 256" in (captured := capsys.readouterr().out) and "7 of 7 tensors coded" in captured
    info = Checkpoint.open(tmp_path / "packed").tensor_info("mlp.experts.down_proj")
    data = np.fromfile(info.file, np.uint8)[info.offset : info.offset + info.nbytes]
    tensor = CodedTensor.open("down_proj", info, lambda begin, end: data[begin:end], CODEC)
    fetched: list[int] = []

    def fetch(begin: int, end: int) -> np.ndarray:
        fetched.append(end - begin)
        return data[begin:end]

    size = experts[0].nbytes
    for i, expert in enumerate(experts):
        assert tensor.read(fetch, i * size, (i + 1) * size).tobytes() == expert.tobytes()
    assert max(fetched) < info.nbytes // 2


def load_corrupted(plain: Path, to: Path, data: bytes) -> dict[str, bytes] | None:
    """Return the tensors that a loader reads from the damaged file; None for a typed error.

    Another dtype or shape than the config's is a typed error of every loader. Other exceptions fail the test.
    """
    to.unlink(missing_ok=True)  # ext4 takes 2 ms to write over a file
    to.write_bytes(data)
    try:
        kinds = {name: (info.dtype, info.shape) for name, info in read_tensors(to).items()}
        if kinds != {name: (info.dtype, info.shape) for name, info in read_tensors(plain).items()}:
            return None
        return tensors(to)
    except ModelError:
        return None


def test_any_changed_byte_is_detected(tmp_path: Path) -> None:
    source = unweight_models.write(tmp_path / "plain", rows=32)
    model.pack_model(source, tmp_path / "packed", CODEC, ignore_progress)
    plain, whole = source / "model.safetensors", (tmp_path / "packed" / "model.safetensors").read_bytes()
    right, unnoticed = tensors(plain), 0
    for at in [*range(400), *range(400, len(whole), 111)]:
        bad = bytearray(whole)
        bad[at] ^= 1 << at % 8
        found = load_corrupted(plain, tmp_path / "bad.safetensors", bytes(bad))
        assert found is None or found == right, at
        unnoticed += found is not None
    assert unnoticed < 64  # only padding at the end of coded tensors


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_give_other_weights(packed_model: Path, data: st.DataObject) -> None:
    plain, whole = (
        packed_model.parent / "plain" / "model.safetensors",
        (packed_model / "model.safetensors").read_bytes(),
    )
    right = tensors(plain)
    bad = bytearray(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    for _ in range(data.draw(st.integers(0, 5))):
        if bad:
            at = data.draw(st.integers(0, len(bad) - 1))
            bad[at : at + data.draw(st.integers(1, 9))] = data.draw(st.binary(max_size=9))
    found = load_corrupted(plain, packed_model.parent / "bad.safetensors", bytes(bad))
    assert found is None or found == right


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "zip"}, {"codec": "raw"}, {"codec": None}, {"dtype": "I16"}, {"dtype": "F32"}, {"dtype": "X"},
        {"dtype": "F16", "shape": [128, 96]}, {"shape": [97, 128]}, {"shape": [1 << 40, 1 << 40]}, {"shape": [-96, -1]},
        {"shape": "96"}, {"shape": [96.0, 128]}, {"first": 255}, {"lengths": "1"}, {"lengths": "11"}, {"lengths": None},
        {"crc32": "x"}, {"crc32": 1}, {"sha256": "0" * 64}, {"sha256": None}, {"dtype": ["BF16"]},
        {"codec": "raw", "shape": [10**3000, 10**3000]},
    ],
)  # fmt: skip
def test_false_tensor_metadata_is_a_typed_error(packed_model: Path, change: dict[str, object]) -> None:
    """With a valid header hash, nothing crashes, and tensors that do not match their own hash are refused."""
    path = packed_model / "model.safetensors"
    unweight_models.lie(path, "embed", {})
    assert model.verify_model(packed_model, packed_model.parent / "plain", CODEC, ignore_progress) == []
    unweight_models.lie(path, "embed", change)
    if change == {"dtype": "F16", "shape": [128, 96]}:  # the same bytes under another dtype: only the original shows it
        assert model.verify_model(packed_model, None, CODEC, ignore_progress) == []
        assert len(model.verify_model(packed_model, packed_model.parent / "plain", CODEC, ignore_progress)) == 1
        with pytest.raises(ModelFileError):
            model.unpack_model(packed_model, packed_model.parent / "again", CODEC, ignore_progress)
        return
    with pytest.raises(ModelError), ThreadPoolExecutor(1) as pool:
        file = ModelFile(path, CODEC)
        list(iter_verified_chunks(file, "embed", pool))


def test_verify_names_errors(packed_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = Checkpoint.open(packed_model).tensor_info("odd")
    with info.file.open("r+b") as file:
        file.seek(info.offset + 1000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    assert main(["unweight", "verify", str(packed_model), "--quiet"]) == 1
    captured = capsys.readouterr()
    assert "'odd'" in captured.err and "block 0" in captured.err and captured.out == "problems found: 1\n"
    (packed_model / "config.json").write_text("{}")
    assert main(["unweight", "verify", str(packed_model.parent / "plain"), str(packed_model), "--quiet"]) == 1
    assert "config.json" in capsys.readouterr().err


def test_verify_detects_another_model(packed_model: Path, tmp_path: Path) -> None:
    other = unweight_models.write(tmp_path / "other", seed=1)
    assert len(model.verify_model(packed_model, other, CODEC, ignore_progress)) >= len(KINDS)


def test_packed_and_unpacked_inputs_are_checked(packed_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="packed already"):
        model.pack_model(packed_model, tmp_path / "twice", CODEC, ignore_progress)
    with pytest.raises(ModelFileError, match="not packed"):
        model.unpack_model(tmp_path / "plain", tmp_path / "again", CODEC, ignore_progress)
    with pytest.raises(ModelFileError, match="not packed"):
        model.verify_model(tmp_path / "plain", None, CODEC, ignore_progress)
    with pytest.raises(ModelFileError, match="must be the unpacked original"):
        model.verify_model(packed_model, packed_model, CODEC, ignore_progress)
    with pytest.raises(InvalidRequest, match="exists"):
        model.pack_model(tmp_path / "plain", packed_model, CODEC, ignore_progress)
    with pytest.raises(InvalidRequest, match="is inside the source"):
        model.pack_model(tmp_path / "plain", tmp_path / "plain" / "packed", CODEC, ignore_progress)
    with pytest.raises(ModelError, match="cannot create"):
        model.pack_model(tmp_path / "plain", packed_model / "config.json" / "x", CODEC, ignore_progress)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["packed", "plain"]


def test_other_weights_are_left_out_and_named(tmp_path: Path) -> None:
    source = unweight_models.write(tmp_path / "plain")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("")
    assert model.pack_model(source, tmp_path / "packed", CODEC, ignore_progress) == [source / "pytorch_model.bin"]
    assert not (tmp_path / "packed" / "pytorch_model.bin").exists() and not (tmp_path / "packed" / ".cache").exists()


def test_the_commands_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, packed_model, again = unweight_models.write(tmp_path / "m"), tmp_path / "packed", tmp_path / "again"
    assert main(["unweight", "pack", str(source), str(packed_model), "--quiet"]) == 0
    assert "smaller" in capsys.readouterr().out
    assert main(["unweight", "verify", str(source), str(packed_model)]) == 0
    captured = capsys.readouterr()
    assert "all tensors match their hashes" in captured.out and "100%" in captured.err
    figures, plot = tmp_path / "f.json", tmp_path / "f.svg"
    assert main(["unweight", "info", str(packed_model), "--json", str(figures), "--svg", str(plot)]) == 0
    assert "embed" in capsys.readouterr().out and plot.read_text().startswith("<svg")
    read = json.loads(figures.read_text())
    rows = {row["name"]: row for row in read["tensors"]}
    assert read["totals"]["coded"] == len(KINDS)
    assert 10 < rows["embed"]["bound"] < rows["embed"]["bits"] < 11.5 and rows["noise"]["bound"] is None
    assert main(["unweight", "unpack", str(packed_model), str(again), "--quiet"]) == 0
    assert contents(again) == contents(source)
    assert main(["unweight", "info", str(source)]) == 1 and "not packed" in capsys.readouterr().err


def test_pull_packs_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = unweight_models.write(tmp_path / "m")
    kernels = kernel_dir()
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(kernels, tmp_path / "cache" / "kernels")
    places = []
    for _ in range(2):  # the second run finds it
        assert main(["pull", str(source), "--unweight", "--quiet"]) == 0
        places.append(Path(capsys.readouterr().out.strip()))
    assert places[0] == places[1] and places[0].is_relative_to(tmp_path / "cache" / "unweight")
    assert model.verify_model(places[0], source, CODEC, ignore_progress) == []
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["pull", str(source), "--unweight", "--quiet"]) == 0
    place = Path(capsys.readouterr().out.strip())
    assert place != places[0] and (place / "chat_template.jinja").exists(), "copied files are compared too"


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    source = unweight_models.write(tmp_path / "m")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    (source / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    (source / "round").symlink_to(source)
    model.pack_model(source, tmp_path / "packed", CODEC, ignore_progress)
    assert (tmp_path / "packed" / "1_Pooling" / "config.json").read_text() == "{}"
    assert not (tmp_path / "packed" / "round").exists()
    assert model.verify_model(tmp_path / "packed", source, CODEC, ignore_progress) == []


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "packed.partial").mkdir()
    (tmp_path / "packed.partial" / "thesis.txt").write_text("mine")
    model.pack_model(unweight_models.write(tmp_path / "m"), tmp_path / "packed", CODEC, ignore_progress)
    assert (tmp_path / "packed.partial" / "thesis.txt").read_text() == "mine"


SLOW = """
import sys, time
from pathlib import Path
from emberline.unweight import model
from emberline.unweight.codec import select_weight_codec

def report_progress(n):
    print("some", flush=True)
    time.sleep(60)

model.pack_model(Path(sys.argv[1]), Path(sys.argv[2]), select_weight_codec(None), report_progress)
"""


def test_killed_pack_leaves_nothing_and_second_run_succeeds(tmp_path: Path) -> None:
    source, target = unweight_models.write(tmp_path / "m"), tmp_path / "packed"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "some\n"
    with pytest.raises(InvalidRequest, match="another process"):
        model.pack_model(source, target, CODEC, ignore_progress)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert not target.exists() and (tmp_path / ".packed.partial" / "model.safetensors").exists()
    model.pack_model(source, target, CODEC, ignore_progress)
    assert model.verify_model(target, source, CODEC, ignore_progress) == []
    assert not (tmp_path / ".packed.partial").exists()


def test_error_while_packing_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise KeyboardInterrupt

    source = unweight_models.write(tmp_path / "m")
    with pytest.raises(KeyboardInterrupt):
        model.pack_model(source, tmp_path / "packed", CODEC, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_newer_version_is_refused(packed_model: Path) -> None:
    path = packed_model / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"2"', 1))
    with pytest.raises(EmberlineError, match="version '2'"):
        Checkpoint.open(packed_model)


def test_sound_gguf_is_not_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "model.gguf", "Q4_0")
    assert main(["unweight", "verify", str(tmp_path / "model.gguf"), "--quiet"]) != 0
    assert "is a GGUF file, not a packed model" in capsys.readouterr().err
