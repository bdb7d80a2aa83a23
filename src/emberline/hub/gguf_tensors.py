"""GGUFTensorInfo: a tensor of a checkpoint that is stored in a GGUF file.

A checkpoint directory of a GGUF model has no weights. Its file gguf.json lists the tensors and where they are. This
module needs only the standard library; gguf_rows.py reads the values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.core.jsonfile import read_object
from emberline.hub.gguf import TENSOR_TYPES, GGUFTensorType
from emberline.hub.tensorfile import TensorInfo

INDEX_FILE = "gguf.json"
TYPES_BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class GGUFTensorInfo(TensorInfo):
    """A tensor in a GGUF file. `dtype` and `shape` are those of the checkpoint's tensor that it becomes.

    With `latent_values`, this tensor has the keys of latent attention; `shape` is that of keys and values joined."""

    name: str = field(kw_only=True)  # in the checkpoint
    block_type: GGUFTensorType = field(kw_only=True)
    rotary_heads: int = field(kw_only=True, default=0)  # heads whose rows are stored as rotary pairs; 0: usual order
    added: float = field(kw_only=True, default=0.0)  # the file has the checkpoint's values plus this
    latent_values: GGUFTensorInfo | None = field(kw_only=True, default=None)

    @property
    def has_blocks(self) -> bool:
        """Whether the file has the tensor's rows as quantised blocks, in any order of the rows."""
        return self.block_type.name not in PLAIN_TYPES and self.latent_values is None

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_type.block_elements * self.block_type.block_bytes


def write_index(path: Path, tensors: Mapping[str, GGUFTensorInfo]) -> None:
    files = {info.file: info.file.stat().st_size for info in tensors.values()}
    order = {file: number for number, file in enumerate(files)}
    index = {
        "files": [{"path": str(file), "bytes": size} for file, size in files.items()],
        "tensors": {name: _describe(info, order) for name, info in tensors.items()},
    }
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, separators=(",", ":")))
        file.flush()
        os.fsync(file.fileno())


def _describe(info: GGUFTensorInfo, order: Mapping[Path, int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": info.block_type.name, "dtype": info.dtype, "shape": info.shape}
    entry |= {"file": order[info.file], "offset": info.offset, "nbytes": info.nbytes}
    entry |= {"rotary_heads": info.rotary_heads} if info.rotary_heads else {}
    entry |= {"added": info.added} if info.added else {}
    if info.latent_values is not None:
        entry["latent_values"] = _describe(info.latent_values, order)
    return entry


def read_index(directory: Path) -> dict[str, GGUFTensorInfo]:
    """Return the tensors that gguf.json lists. Raise ModelFileError if a GGUF file is missing or has changed."""
    path = directory / INDEX_FILE
    index = read_object(path)
    try:
        files = [(Path(file["path"]), int(file["bytes"])) for file in index["files"]]
        tensors = {name: _parse(name, entry, files) for name, entry in index["tensors"].items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise ModelFileError(f"{path} is damaged: {e!r}", hint=f"delete {directory} and try again") from e
    for file, size in files:
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ModelFileError(
                f"{file}, which has the weights of {directory}, {state}",
                hint="put the file back, or start with the path of the .gguf file, not its directory in the cache",
            )
    return tensors


def is_index_valid(directory: Path) -> bool:
    """Return whether the index can be read and its GGUF files are where it says, unchanged in size."""
    try:
        read_index(directory)
    except ModelFileError:
        return False
    return True


def list_index_files(directory: Path) -> list[Path]:
    """Return the GGUF files that have the weights of a checkpoint directory, a split model's in order."""
    return sorted({info.file for info in read_index(directory).values()})


def _parse(name: str, entry: Mapping[str, Any], files: list[tuple[Path, int]]) -> GGUFTensorInfo:
    kind, shape = TYPES_BY_NAME[entry["type"]], tuple(int(size) for size in entry["shape"])
    (file, file_bytes), offset, nbytes = files[entry["file"]], int(entry["offset"]), int(entry["nbytes"])
    values = _parse(name, entry["latent_values"], files) if "latent_values" in entry else None
    elements = prod(shape) - (0 if values is None else prod(values.shape))
    if offset < 0 or offset + nbytes > file_bytes or elements // kind.block_elements * kind.block_bytes != nbytes:
        raise ValueError(f"a tensor of shape {shape} and {nbytes} bytes of {kind.name} at byte {offset}")
    return GGUFTensorInfo(
        str(entry["dtype"]),
        shape,
        file,
        offset,
        nbytes,
        name=name,
        block_type=kind,
        rotary_heads=int(entry.get("rotary_heads", 0)),
        added=float(entry.get("added", 0.0)),
        latent_values=values,
    )
