"""Small model directories for tests of packing: every dtype, awkward shapes, a subfolder, several shards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write(directory: Path, *, shards: int = 1, seed: int = 0, rows: int = 96) -> Path:
    """numpy has no bf16 and no fp8: integers are written, and renamed in the header."""
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "test"}\n')
    (directory / "sub").mkdir()
    (directory / "sub" / "more.json").write_text("{}")
    tensors = {
        "embed": bf16(random, rows, 128),
        "odd": bf16(random, 67, 131),
        "norm": bf16(random, 129),
        "wide": random.standard_normal((70, 65)).astype("<f4"),
        "half": (random.standard_normal((64, 96)) * 0.02).astype("<f2"),
        "eight": (random.geometric(0.2, (80, 70)) % 256).astype("<u1"),
        "noise": random.integers(0, 1 << 16, (64, 128)).astype("<u2"),
        "scale": np.array(1.5, "<f4"),
        "ids": np.arange(7, dtype="<i8"),
        "empty": np.zeros((0, 5), "<f4"),
    }
    renamed = {**dict.fromkeys(("embed", "odd", "norm", "noise"), "BF16"), "eight": "F8_E4M3"}
    where = {name: f"model-{i % shards + 1}-of-{shards}.safetensors" for i, name in enumerate(tensors)}
    if shards == 1:
        where = dict.fromkeys(tensors, "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for file in set(where.values()):
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(part, directory / file, metadata={"format": "pt", "note": 'a "quoted" ü'})
        _rename_dtypes(directory / file, {name: dtype for name, dtype in renamed.items() if name in part})
    return directory


def save(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    """All bf16, in one file."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "test"}\n')
    save_file(tensors, directory / "model.safetensors")
    _rename_dtypes(directory / "model.safetensors", dict.fromkeys(tensors, "BF16"))
    return directory


def bf16(random: np.random.Generator, *shape: int) -> np.ndarray:
    return ((random.standard_normal(shape) * 0.02).astype("<f4").view("<u4") >> 16).astype("<u2")


def _rename_dtypes(path: Path, dtypes: dict[str, str]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, dtype in dtypes.items():
        header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def lie(path: Path, name: str, change: dict[str, object]) -> None:
    """About a tensor of a packed file, as someone would who means harm: the header's own hash is right again."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    said = json.loads(metadata["tensors"])
    said[name] |= change
    metadata["tensors"], metadata["check"] = json.dumps(said), "0" * 64
    text = json.dumps(header).encode()
    text += b" " * (length - len(text))
    check = hashlib.sha256(text).hexdigest()
    path.write_bytes(len(text).to_bytes(8, "little") + text.replace(b"0" * 64, check.encode(), 1) + data[8 + length :])
