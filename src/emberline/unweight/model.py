"""Packs, unpacks and verifies model directories.

The target directory is created only when it is complete. Files other than weights are copied unchanged.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from emberline.core.cpus import core_count
from emberline.core.errors import InvalidRequest, ModelError, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.unweight.codec import WeightCodec
from emberline.unweight.file import ModelFile
from emberline.unweight.pack import ReportProgress, pack_file
from emberline.unweight.unpack import iter_verified_chunks, unpack_file

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".pkl"}


def pack_model(source: Path, target: Path, codec: WeightCodec, report_progress: ReportProgress) -> list[Path]:
    """Pack the model directory `source` into the new directory `target`.

    Return the weight files that were not copied, because they do not belong to the checkpoint.
    """
    files = list_weight_files(source)
    with _atomic_directory(target, source) as work, ThreadPoolExecutor(core_count()) as pool:
        for file in files:
            pack_file(file, work / file.name, codec, pool, report_progress)
        return _copy_other_files(source, work)


def unpack_model(source: Path, target: Path, codec: WeightCodec, report_progress: ReportProgress) -> None:
    """Restore the original of the packed directory `source`, byte for byte, in the directory `target`."""
    files = list_weight_files(source)
    with _atomic_directory(target, source) as work, ThreadPoolExecutor(core_count()) as pool:
        for file in files:
            unpack_file(file, work / file.name, codec, pool, report_progress)
        _copy_other_files(source, work)


def verify_model(packed: Path, original: Path | None, codec: WeightCodec, report_progress: ReportProgress) -> list[str]:
    """Return messages about all packed tensors that do not match their hashes.

    With `original`, also compare all tensors and files with that unpacked directory.
    """
    errors: list[str] = []
    tensors = _open_tensors(packed, codec, packed=True)
    sources = {} if original is None else _open_tensors(original, codec, packed=False)
    with ThreadPoolExecutor(core_count()) as pool:
        for name, file in tensors.items():
            try:
                if original is not None and name not in sources:
                    raise ModelFileError(f"tensor {name!r} is not in {original}")
                _verify_tensor(name, file, sources.pop(name, None), pool, report_progress)
            except ModelFileError as e:
                errors.append(str(e))
    errors += [f"tensor {name!r} of {original} is missing in {packed}" for name in sources]
    return errors if original is None else errors + _find_differing_files(original, packed)


def list_weight_files(directory: Path) -> list[Path]:
    return sorted({info.file for info in Checkpoint.open(directory).tensors.values()})


def _open_tensors(directory: Path, codec: WeightCodec, *, packed: bool) -> dict[str, ModelFile]:
    files = []
    for path in list_weight_files(directory):
        if path.suffix == ".gguf":
            wanted = "a packed model" if packed else "the unpacked original in safetensors files"
            raise ModelFileError(f"{path} is a GGUF file, not {wanted}", hint="emberline unweight pack SRC DST")
        files.append(ModelFile(path, codec))
    for file in files:
        if file.header.is_packed != packed:
            hint = "run emberline unweight pack first" if packed else "compare with the original, unpacked model"
            raise ModelFileError(
                f"{file.path} is {'not packed' if packed else 'packed, but must be the unpacked original'}", hint=hint
            )
    return {name: file for file in files for name in file.tensors}


def _verify_tensor(
    name: str, file: ModelFile, source: ModelFile | None, pool: ThreadPoolExecutor, report_progress: ReportProgress
) -> None:
    info, position = file.tensors[name], 0
    original = None if source is None else source.tensors[name]
    if original is not None and (original.dtype, original.shape) != (info.dtype, info.shape):
        raise ModelFileError(f"tensor {name!r} in {file.path} has a different dtype or shape than in {original.file}")
    for chunk in iter_verified_chunks(file, name, pool):
        if source and original and not np.array_equal(chunk, source.read(original, position, position + len(chunk))):
            raise ModelFileError(f"tensor {name!r} in {file.path} differs from {original.file}")
        position += len(chunk)
        report_progress(len(chunk))


@contextmanager
def _atomic_directory(target: Path, source: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `target` at the end, or removed after an error.

    If a killed process left files in the temporary directory, they are removed first.
    """
    if target.exists() or target.is_symlink():
        raise InvalidRequest(f"{target} exists already", hint="remove it, or choose another target")
    if target.resolve().is_relative_to(source.resolve()):
        raise InvalidRequest(f"the target {target} is inside the source {source}", hint="choose a target outside")
    work = target.with_name(f".{target.name}.partial")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(work) as handle:
            _remove_files(work.iterdir())
            try:
                yield work
                os.fsync(handle)
                work.rename(target)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    except OSError as e:
        reason = f"{e.filename or work}: {e.strerror or e}"
        raise ModelError(f"cannot create {target}: {reason}", hint="partial output was removed") from e


@contextmanager
def _exclusive_lock(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise InvalidRequest(f"another process is writing {directory}") from e
        yield handle
    finally:
        os.close(handle)


def _remove_files(paths: Iterator[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _iter_other_files(directory: Path) -> Iterator[Path]:
    """Yield all files of the directory except the checkpoint's weight files and hidden files."""
    weights = set(list_weight_files(directory))
    seen: set[str] = set()
    for folder, folders, files in os.walk(directory, onerror=_raise_error, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := os.path.realpath(folder)) in seen:  # a symbolic link to a folder already visited
            folders.clear()
            continue
        seen.add(real)
        yield from (path for name in files if not name.startswith(".") and (path := Path(folder) / name) not in weights)


def _raise_error(error: OSError) -> None:
    raise error


def iter_copied_files(directory: Path) -> Iterator[Path]:
    """Yield the files that packing copies unchanged: all except weight files and hidden files."""
    return (path for path in _iter_other_files(directory) if path.suffix not in WEIGHT_SUFFIXES)


def _copy_other_files(source: Path, target: Path) -> list[Path]:
    for path in iter_copied_files(source):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        with to.open("rb") as copy:
            os.fsync(copy.fileno())
    return [path for path in _iter_other_files(source) if path.suffix in WEIGHT_SUFFIXES]


def _find_differing_files(original: Path, packed: Path) -> list[str]:
    pairs = [(path, packed / path.relative_to(original)) for path in iter_copied_files(original)]
    return [
        f"{copy} differs from {path}"
        for path, copy in pairs
        if not (copy.is_file() and filecmp.cmp(path, copy, shallow=False))
    ]
