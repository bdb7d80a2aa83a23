"""Makes checkpoint directories of GGUF models. Weights stay in the GGUF files, or are converted to safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.atomic_directory import atomic_directory, file_lock
from emberline.hub.dequant import Bytes
from emberline.hub.gguf import GGUFTensor
from emberline.hub.gguf_architectures import GGUFArchitecture, select_architecture
from emberline.hub.gguf_latents import JoinedLatents, join_latents
from emberline.hub.gguf_metadata import GGUFMetadata
from emberline.hub.gguf_model import GGUFModel
from emberline.hub.gguf_rows import iter_checkpoint_bytes
from emberline.hub.gguf_tensors import INDEX_FILE, GGUFTensorInfo, is_index_valid, write_index
from emberline.hub.ggufconfig import build_generation_config, build_model_config
from emberline.hub.gguftokenizer import build_tokenizer_files
from emberline.hub.tensorfile import DTYPE_BYTES, TensorInfo, write_tensors

StoredTensor = GGUFTensor | JoinedLatents

MAX_LAYERS = 1024  # more are rejected as damaged or malicious


@dataclass(frozen=True)
class GGUFCheckpoint:
    """The files of a checkpoint directory, and its tensors in the GGUF files."""

    files: dict[str, str]  # text by file name
    tensors: dict[str, GGUFTensorInfo]

    @staticmethod
    def from_model(model: GGUFModel) -> GGUFCheckpoint:
        """Return the checkpoint of a GGUF model. Raise ModelFileError or UnsupportedModel if it cannot be one."""
        try:
            return GGUFCheckpoint._read(model)
        except (ModelFileError, UnsupportedModel) as e:
            if str(model.path) in e.message:
                raise
            raise type(e)(f"{model.path}: {e.message}", param=e.param, hint=e.hint) from e

    @staticmethod
    def _read(model: GGUFModel) -> GGUFCheckpoint:
        tokenizer, tokenizer_config = build_tokenizer_files(model.metadata)
        architecture, fields = select_architecture(model.metadata), GGUFMetadata(model.metadata)
        layers, draft_layers = fields.get_integer("block_count"), fields.get_integer("nextn_predict_layers", 0)
        if not 0 <= draft_layers < layers <= MAX_LAYERS:
            raise ModelFileError(
                f"{model.path} has block_count {layers} and nextn_predict_layers {draft_layers}; there must be 1 to"
                f" {MAX_LAYERS} blocks, and fewer layers for multi-token prediction"
            )
        stored = _tensors_by_name(model, architecture, layers - draft_layers)
        config = build_model_config(model, architecture, _torch_dtype(stored))
        if len(model.metadata["tokenizer.ggml.tokens"]) > config["vocab_size"]:
            raise ModelFileError(f"{model.path} has more tokens in its vocabulary than rows in its embedding")
        permuted: dict[str, int] = {}
        if architecture.has_rotary_pairs:
            permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        tensors = {
            name: _make_info(model, name, tensor, permuted, architecture.norm_offset) for name, tensor in stored.items()
        }
        files = {
            "config.json": _format_json(config),
            "generation_config.json": _format_json(build_generation_config(model.metadata)),
            "tokenizer_config.json": _format_json(tokenizer_config),
            "tokenizer.json": tokenizer,
        }
        return GGUFCheckpoint(files, tensors)


def index_gguf(source: Path, target: Path, default_metadata: Mapping[str, Any] = {}) -> Path:
    """Make the checkpoint directory `target` for `source` unless it exists, and return `target`.

    The weights stay in the GGUF file, or in all parts of a split model that `source` is a part of; the directory has
    an index of them. The directory appears complete or not at all. `default_metadata` has values for metadata keys
    that the file lacks.
    """

    def write_files(model: GGUFModel, checkpoint: GGUFCheckpoint, work: Path) -> None:
        write_index(work / INDEX_FILE, checkpoint.tensors)

    if target.is_dir() and not is_index_valid(target):  # of a file that was moved, or of a cache that was
        with file_lock(target.with_name(f".{target.name}.lock")):
            if not is_index_valid(target):
                shutil.rmtree(target, ignore_errors=True)
    return _make_directory(source, target, write_files, default_metadata)


def convert_gguf(source: Path, target: Path) -> Path:
    """Convert a GGUF model to the checkpoint directory `target` unless it exists, and return `target`.

    `source`: the model's file, or any part of a split model. The weights are written as safetensors; quantised ones
    become bfloat16. The directory appears complete or not at all."""

    def write_files(model: GGUFModel, checkpoint: GGUFCheckpoint, work: Path) -> None:
        order = sorted(checkpoint.tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0]))
        values = _iter_all_tensor_bytes(model, [info for _, info in order])
        write_tensors(work / "model.safetensors", {name: (info.dtype, info.shape) for name, info in order}, values)

    return _make_directory(source, target, write_files, {})


def _make_directory(
    source: Path,
    target: Path,
    write_files: Callable[[GGUFModel, GGUFCheckpoint, Path], None],
    default_metadata: Mapping[str, Any],
) -> Path:
    if target.is_dir():
        return target
    with file_lock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            with GGUFModel(source) as model:
                model.metadata = {**default_metadata, **model.metadata}
                checkpoint = GGUFCheckpoint.from_model(model)
                with atomic_directory(target) as work:
                    for name, text in checkpoint.files.items():
                        _write_text(work / name, text)
                    write_files(model, checkpoint, work)
    return target


def _tensors_by_name(model: GGUFModel, architecture: GGUFArchitecture, layers: int) -> dict[str, StoredTensor]:
    out: dict[str, GGUFTensor] = {}
    for stored in model.tensors.values():
        for name, tensor in architecture.list_checkpoint_tensors(stored, layers):
            if name in out:
                raise ModelFileError(f"{model.path} has two tensors for {name}")
            out[name] = tensor
    return join_latents(out)


def _checkpoint_dtype(tensor: StoredTensor) -> str:
    return tensor.type.name if tensor.type.name in ("F32", "F16") else "BF16"


def _torch_dtype(tensors: dict[str, StoredTensor]) -> str:
    dtypes = {_checkpoint_dtype(t) for t in tensors.values() if len(t.shape) > 1}
    return "bfloat16" if "BF16" in dtypes else "float16" if "F16" in dtypes else "float32"


def _make_info(
    model: GGUFModel, name: str, tensor: StoredTensor, permuted: dict[str, int], norm_offset: float
) -> GGUFTensorInfo:
    """Return the info of the checkpoint tensor `name`, which is stored in a GGUF file as `tensor`.

    `permuted`: the number of heads by layer tensor, such as attn_q, if its rows are stored as rotary pairs.
    `norm_offset`: number that the file has added to the weights of norms. Raises UnsupportedModel or ModelFileError."""
    first = tensor.keys if isinstance(tensor, JoinedLatents) else tensor
    dtype, file = _checkpoint_dtype(tensor), model.file_of(first).absolute()
    if isinstance(tensor, JoinedLatents):
        values = _make_info(model, name, tensor.values, {}, 0.0)
        return GGUFTensorInfo(
            *(dtype, tensor.shape, file, first.start, first.nbytes),
            name=name,
            block_type=first.type,
            latent_values=values,
        )
    is_offset = bool(norm_offset) and tensor.name.endswith("norm.weight")
    if is_offset and tensor.type.name != "F32":
        raise UnsupportedModel(f"GGUF tensor {tensor.name!r} must have the type F32, not {tensor.type.name}")
    heads = 0 if is_offset else permuted.get(tensor.name.split(".")[-2], 0)
    if tensor.name.split(".")[-2] in permuted and (heads < 1 or tensor.shape[0] % (2 * heads)):
        raise ModelFileError(
            f"GGUF tensor {tensor.name} has {tensor.shape[0]} rows, which cannot be divided evenly among {heads} heads"
        )
    return GGUFTensorInfo(
        dtype,
        tensor.shape,
        file,
        tensor.start,
        tensor.nbytes,
        name=name,
        block_type=tensor.type,
        rotary_heads=heads,
        added=norm_offset if is_offset else 0.0,
    )


def _iter_all_tensor_bytes(model: GGUFModel, tensors: list[GGUFTensorInfo]) -> Iterator[bytes]:
    def read(info: TensorInfo) -> Bytes:
        return np.frombuffer(model.view_bytes(info.file, info.offset, info.nbytes), np.uint8)

    for info in tensors:
        yield from iter_checkpoint_bytes(info, read)


def _format_json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
