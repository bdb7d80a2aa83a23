"""Checkpoint: a model directory with its JSON files and the location of each tensor.

Pickled weights are never loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError
from emberline.core.jsonfile import read_object, read_object_if_exists
from emberline.hub.gguf_tensors import INDEX_FILE as GGUF_INDEX_FILE
from emberline.hub.gguf_tensors import read_index as read_gguf_index
from emberline.hub.tensorfile import TensorInfo, read_tensors

INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
MAX_SHARDS = 4096
MAX_LISTED_NAMES = 10


def format_names(names: Sequence[str]) -> str:
    """Return the first names of a list, for an error message."""
    more = len(names) - MAX_LISTED_NAMES
    return ", ".join(repr(name[:120]) for name in names[:MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


class MissingTensor(ModelFileError):
    """The model needs a tensor that the checkpoint does not have."""


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """Read the JSON files and tensor headers. Raise ModelFileError if one is missing or damaged."""
        if not (directory / "config.json").is_file():
            raise ModelFileError(f"{directory} is not a model directory: config.json is missing")
        return Checkpoint(
            directory,
            _read_config(directory),
            read_object_if_exists(directory / "generation_config.json"),
            read_object_if_exists(directory / "tokenizer_config.json"),
            _read_all_tensors(directory),
        )

    def tensor_names(self) -> list[str]:
        return list(self.tensors)

    def tensor_info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            hint = "check that config.json belongs to this model"
            raise MissingTensor(f"{self.directory} has no tensor {name!r}", hint=hint) from None


def _read_config(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json.

    ModelOpt writes the quantisation into a file of its own, hf_quant_config.json, and only some versions also into
    config.json. If config.json has none, the result's quantization_config has the contents of that file, under its
    name."""
    config = read_object(directory / "config.json")
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    if not any(part.get("quantization_config") for part in parts) and (directory / MODELOPT_FILE).exists():
        return {**config, "quantization_config": {MODELOPT_FILE: read_object(directory / MODELOPT_FILE)}}
    return config


def _read_all_tensors(directory: Path) -> dict[str, TensorInfo]:
    if (directory / GGUF_INDEX_FILE).is_file():
        return dict(read_gguf_index(directory))
    tensors = (
        _read_tensors_with_index(directory)
        if (directory / INDEX_FILE).exists()
        else _read_tensors_without_index(directory)
    )
    if not tensors:
        raise ModelFileError(f"the weight files in {directory} have no tensors", hint="download the model again")
    return tensors


def _read_tensors_without_index(directory: Path) -> dict[str, TensorInfo]:
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        hint = "convert the model to safetensors; pickled weights (*.bin, *.pt) are not loaded"
        raise ModelFileError(f"{directory} has no *.safetensors file", hint=hint)
    out: dict[str, TensorInfo] = {}
    for file in files:
        _merge_tensors(out, read_tensors(file))
    return out


def _read_tensors_with_index(directory: Path) -> dict[str, TensorInfo]:
    index = directory / INDEX_FILE
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} has no field weight_map", hint="download the model again")
    shards: set[str] = set()
    for file in weight_map.values():
        # The hub's cache stores symbolic links to its blobs, so the name is checked and not the link's target.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ModelFileError(f"{index} names {file!r}, which is not a *.safetensors file in the same directory")
        shards.add(file)
    if len(shards) > MAX_SHARDS:
        raise ModelFileError(f"{index} names {len(shards)} files; at most {MAX_SHARDS} are supported")
    out: dict[str, TensorInfo] = {}
    for shard in sorted(shards):
        _merge_tensors(out, read_tensors(directory / shard))
    for name, file in weight_map.items():
        if name not in out or out[name].file.name != file:
            hint = "download the model again"
            raise ModelFileError(
                f"{index} lists tensor {name!r} in {file}, but that file does not contain it", hint=hint
            )
    return out


def _merge_tensors(merged: dict[str, TensorInfo], added: dict[str, TensorInfo]) -> None:
    for name, info in added.items():
        if name in merged:
            raise ModelFileError(f"tensor {name!r} is in both {merged[name].file} and {info.file}")
        merged[name] = info
