"""Checkpoint.open: sharded and single files; damaged, missing or foreign files raise a typed error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from emberline.core.errors import EmberlineError, ModelFileError, UnsupportedModel
from emberline.hub.checkpoint import INDEX_FILE, Checkpoint
from emberline.hub.tensorfile import read_tensors, write_tensors

A = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.float16)}
B = {"c": np.ones((2, 2), dtype=np.float32)}


def make(folder: Path, *shards: dict[str, Any], index: dict[str, str] | None = None) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for i, tensors in enumerate(shards):
        save_file(tensors, folder / (f"part-{i}.safetensors" if len(shards) > 1 else "model.safetensors"))
    if index is not None:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return folder


def write_checkpoint(checkpoint: Checkpoint, name: str) -> bytes:
    info = checkpoint.tensor_info(name)
    return info.file.read_bytes()[info.offset : info.offset + info.nbytes]


@pytest.mark.parametrize(
    "index", [None, {"a": "part-0.safetensors", "b": "part-0.safetensors", "c": "part-1.safetensors"}]
)
def test_shards_with_and_without_an_index(tmp_path: Path, index: dict[str, str] | None) -> None:
    checkpoint = Checkpoint.open(make(tmp_path, A, B, index=index))
    assert sorted(checkpoint.tensor_names()) == ["a", "b", "c"]
    assert checkpoint.tensor_info("a").shape == (3, 4)
    assert checkpoint.tensor_info("b").dtype == "F16"
    for name, value in (A | B).items():
        assert write_checkpoint(checkpoint, name) == value.tobytes()


def test_reads_json_files(tmp_path: Path) -> None:
    make(tmp_path, A)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": 3}
    assert checkpoint.tokenizer_config == {}
    with pytest.raises(ModelFileError, match="no tensor 'x'"):
        checkpoint.tensor_info("x")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", "\0.safetensors", 3]
)
def test_index_cannot_name_files_in_other_directories(tmp_path: Path, file: Any) -> None:
    with pytest.raises(ModelFileError, match="names"):
        Checkpoint.open(make(tmp_path, A, B, index={"a": file}))


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"part-7\.safetensors is missing.*download"):
        Checkpoint.open(make(tmp_path, A, B, index={"a": "part-7.safetensors"}))
    with pytest.raises(ModelFileError, match="does not contain it"):
        Checkpoint.open(make(tmp_path, A, B, index={"a": "part-1.safetensors"}))
    with pytest.raises(ModelFileError, match="weight_map"):
        Checkpoint.open(make(tmp_path, A, B, index={}))


def test_tensor_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="both"):
        Checkpoint.open(make(tmp_path, A, {**B, "a": A["a"]}))


def test_pickles_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFileError, match="safetensors"):
        Checkpoint.open(tmp_path)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        Checkpoint.open(tmp_path)
    make(tmp_path, A)
    for text in ("[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 10_000 + "}", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelFileError):
            Checkpoint.open(tmp_path)


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "empty": b"",
    "short": b"\1\0",
    "long-header": raw({}, length=2**63),
    "not-json": raw(b"{'a'"),
    "name-twice": raw(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
    ),
    "truncated": raw({"a": entry()}, bytes(7)),
    "trailing": raw({"a": entry()}, bytes(9)),
    "overlap": raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "hole": raw({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "hole-and-overlap": raw({"a": entry(), "b": entry(offsets=(4, 12)), "c": entry(offsets=(16, 24))}, bytes(24)),
    "wrong-size": raw({"a": entry(shape=(3,))}, bytes(8)),
    "negative": raw({"a": entry(shape=(-2,), offsets=(8, 0))}, bytes(8)),
    "bool-dim": raw({"a": entry(shape=(True, 2))}, bytes(8)),
    "huge": raw({"a": entry(shape=(2**40, 2**40, 2**40), offsets=(0, 2**122))}, bytes(8)),
    "many-dimensions": raw({"a": entry(shape=(1,) * 100, offsets=(0, 4))}, bytes(4)),
    "no-offsets": raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "three-offsets": raw({"a": entry(offsets=(0, 4, 8))}, bytes(8)),
    "text-entry": raw({"a": "F32"}, bytes(8)),
    "list-dtype": raw({"a": entry(dtype=["F32"])}, bytes(8)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(ModelFileError):
        read_tensors(path)


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    pipe = os.open(tmp_path / "model.safetensors", os.O_RDWR)
    try:
        os.write(pipe, bytes(8))
        with pytest.raises(ModelFileError, match="not a regular file"):
            read_tensors(tmp_path / "model.safetensors")
    finally:
        os.close(pipe)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw({"a": entry(dtype="Q3")}, bytes(8)))
    with pytest.raises(UnsupportedModel, match="Q3"):
        read_tensors(tmp_path / "x.safetensors")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    save_file(A, path)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    del damaged[data.draw(st.integers(0, 2 * len(damaged))) :]
    path.write_bytes(damaged)
    try:
        tensors = read_tensors(path)
    except EmberlineError:
        return
    assert all(t.offset + t.nbytes <= len(damaged) for t in tensors.values())


def test_safetensors_package_reads_written_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(3, dtype=np.float16)}
    data = b"".join(v.tobytes() for v in values.values())
    write_tensors(path, {"x": ("F32", (2, 3)), "y": ("F16", (3,))}, [data[:5], data[5:]])
    loaded = load_file(path)
    assert all(np.array_equal(loaded[name], value) for name, value in values.items())
    assert read_tensors(path)["x"].offset % 64 == 0
