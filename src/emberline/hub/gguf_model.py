"""GGUFModel: the metadata and tensors of a model in one GGUF file, or in several that it was split into."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.hub.gguf import GGUFFile, GGUFTensor
from emberline.hub.gguf_names import GGUFPartName

PART_NUMBER, PART_COUNT, TENSOR_COUNT = "split.no", "split.count", "split.tensors.count"  # part numbers start at 0


def list_part_files(path: Path) -> list[Path]:
    """Return all files of the model that `path` is a part of. Raise ModelFileError if one is missing."""
    part = GGUFPartName.parse(path.name)
    if part is None:
        return [path]
    files = [path.with_name(name) for name in part.list_all_parts()]
    for file in files:
        if not file.is_file():
            raise ModelFileError(
                f"{file} is missing: {path.name} is one of {part.count} parts of a model",
                hint=f"put all {part.count} parts into one directory",
            )
    return files


class GGUFModel:
    path: Path  # of the first part
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: Path) -> None:
        """Open the file, and all other parts if it is one of a split model.

        Raise ModelFileError if a part is missing or damaged, or belongs to another model.
        """
        files = list_part_files(path)
        self.path = files[0]
        with ExitStack() as stack:
            parts = [stack.enter_context(GGUFFile(file)) for file in files]
            self.metadata = parts[0].metadata
            _check_parts(parts)
            self._part_of = {name: part for part in parts for name in part.tensors}
            self.tensors = {name: part.tensors[name] for name, part in self._part_of.items()}
            self._parts = {part.path.absolute(): part for part in parts}
            self._stack = stack.pop_all()

    def raw_bytes(self, tensor: GGUFTensor) -> memoryview:
        return self._part_of[tensor.name].raw_bytes(tensor)

    def file_of(self, tensor: GGUFTensor) -> Path:
        return self._part_of[tensor.name].path

    def view_bytes(self, file: Path, start: int, size: int) -> memoryview:
        """Return bytes of one of the model's files, whose path is absolute."""
        return self._parts[file].view_bytes(start, size)

    def __enter__(self) -> GGUFModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


def _check_parts(parts: list[GGUFFile]) -> None:
    """Raise ModelFileError unless all parts are of one model, in the order of their numbers."""
    first, count = parts[0], len(parts)
    if count == 1:
        _check_unsplit(first)
        return
    tensor_count = first.metadata.get(TENSOR_COUNT)
    for number, part in enumerate(parts):
        for key, expected in ((PART_NUMBER, number), (PART_COUNT, count), (TENSOR_COUNT, tensor_count)):
            if type(part.metadata.get(key)) is not int or part.metadata[key] != expected:
                raise ModelFileError(
                    f"{part.path} is not part {number + 1} of {count} of the model in {first.path}: "
                    f"{key} is {str(part.metadata.get(key))[:20]}, not {expected}",
                    hint="download all parts of the model again",
                )
        for key in sorted(part.metadata.keys() & first.metadata.keys() - {PART_NUMBER}):
            if part.metadata[key] != first.metadata[key]:
                raise ModelFileError(f"{part.path} is of another model than {first.path}: {key} differs")
    _check_tensor_names(parts, tensor_count)


def _check_unsplit(file: GGUFFile) -> None:
    count = file.metadata.get(PART_COUNT, 1)
    if type(count) is not int or count > 1:
        raise ModelFileError(
            f"{file.path} is one of {str(count)[:20]} parts of a model, but its name does not say which",
            hint="give the parts their names back: NAME-00001-of-00003.gguf and so on",
        )


def _check_tensor_names(parts: list[GGUFFile], tensor_count: Any) -> None:
    seen: dict[str, GGUFFile] = {}
    for part in parts:
        for name in part.tensors:
            if name in seen:
                raise ModelFileError(f"tensor {name!r} is in both {seen[name].path} and {part.path}")
            seen[name] = part
    if len(seen) != tensor_count:
        raise ModelFileError(
            f"the {len(parts)} parts of {parts[0].path} have {len(seen)} tensors, but {TENSOR_COUNT} is {tensor_count}",
            hint="download all parts of the model again",
        )
