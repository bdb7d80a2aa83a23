"""unpack_file: restores the original of a packed file byte for byte, and verifies each tensor's hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import SafetensorsHeader, TensorInfo, list_stored_tensors
from emberline.unweight.codec import WeightCodec
from emberline.unweight.description import TensorDescription
from emberline.unweight.file import ModelFile
from emberline.unweight.format import Bytes
from emberline.unweight.pack import ReportProgress


def unpack_file(
    source: Path, target: Path, codec: WeightCodec, pool: ThreadPoolExecutor, report_progress: ReportProgress
) -> None:
    file = ModelFile(source, codec)
    text = file.header.metadata.get("source")
    if not file.header.is_packed or not isinstance(text, str):
        raise ModelFileError(f"{source} is not packed")
    data_start = 8 + len(text.encode())
    size = data_start + sum(info.logical_bytes for info in file.tensors.values())
    original = list_stored_tensors(source, SafetensorsHeader.parse(text.encode(), source, size))
    if {name: _dtype_and_shape(info) for name, info in original.items()} != {
        name: _dtype_and_shape(t) for name, t in file.tensors.items()
    }:
        raise ModelFileError(
            f"{source} has different tensors than the stored header of the original file", hint="pack the model again"
        )
    with target.open("xb") as out:
        out.write((data_start - 8).to_bytes(8, "little") + text.encode())
        for name, info in original.items():
            out.seek(info.offset)
            for chunk in iter_verified_chunks(file, name, pool):
                out.write(chunk.data)
                report_progress(len(chunk))
        out.flush()
        os.fsync(out.fileno())


def iter_verified_chunks(file: ModelFile, name: str, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
    """Yield the tensor's decoded bytes.

    After the last chunk, raise ModelFileError if the SHA-256 does not match.
    """
    info, digest = file.tensors[name], hashlib.sha256()
    for chunk in file.iter_chunks(name, pool):
        digest.update(chunk.data)
        yield chunk
    if info.packing is not None and digest.hexdigest() != TensorDescription.from_info(info).sha256:
        raise ModelFileError(f"tensor {name!r} in {info.file} is damaged: its SHA-256 differs from the original's")


def _dtype_and_shape(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    return info.dtype, info.shape
