"""Converts a GGUF model once to an ordinary checkpoint directory, so that only `hub` handles GGUF."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.hub.atomic_directory import atomic_directory, file_lock
from emberline.hub.dequant import dequantise, round_to_bf16
from emberline.hub.gguf import GGUFTensor
from emberline.hub.gguf_architectures import GGUFArchitecture, select_architecture
from emberline.hub.gguf_latents import JoinedLatents, join_latents
from emberline.hub.gguf_metadata import GGUFMetadata
from emberline.hub.gguf_model import GGUFModel
from emberline.hub.ggufconfig import build_generation_config, build_model_config
from emberline.hub.gguftokenizer import build_tokenizer_files
from emberline.hub.tensorfile import DTYPE_BYTES, write_tensors

CONVERSION_VERSION = 3  # part of the checkpoint's path: raise it when the result of a conversion changes
CHUNK_BYTES = 8 << 20  # of float32 values dequantised at once

StoredTensor = GGUFTensor | JoinedLatents

MAX_LAYERS = 1024  # more are rejected as damaged or malicious


def convert_gguf(source: Path, target: Path) -> Path:
    """Convert `source` to the checkpoint directory `target` unless it exists, and return `target`.

    If `source` is a part of a split model, all its parts are converted. The directory appears complete or not at all.
    """
    if target.is_dir():
        return target
    with file_lock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            with GGUFModel(source) as model, atomic_directory(target) as work:
                _write_checkpoint(model, work)
    return target


def _write_checkpoint(model: GGUFModel, directory: Path) -> None:
    tokenizer, tokenizer_config = build_tokenizer_files(model.metadata)
    architecture, fields = select_architecture(model.metadata), GGUFMetadata(model.metadata)
    layers, draft_layers = fields.get_integer("block_count"), fields.get_integer("nextn_predict_layers", 0)
    if not 0 <= draft_layers < layers <= MAX_LAYERS:
        raise ModelFileError(
            f"{model.path} has block_count {layers} and nextn_predict_layers {draft_layers}; there must be 1 to"
            f" {MAX_LAYERS} blocks, and fewer layers for multi-token prediction"
        )
    tensors = _tensors_by_name(model, architecture, layers - draft_layers)
    config = build_model_config(model, architecture, _torch_dtype(tensors))
    if len(model.metadata["tokenizer.ggml.tokens"]) > config["vocab_size"]:
        raise ModelFileError(f"{model.path} has more tokens in its vocabulary than rows in its embedding")
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", build_generation_config(model.metadata))
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_text(directory / "tokenizer.json", tokenizer)
    specs = {name: (_checkpoint_dtype(t), t.shape) for name, t in tensors.items()}
    permuted: dict[str, int] = {}
    if architecture.has_rotary_pairs:
        permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    values = _iter_all_tensor_bytes(model, tensors, permuted, architecture.norm_offset)
    write_tensors(directory / "model.safetensors", specs, values)


def _tensors_by_name(model: GGUFModel, architecture: GGUFArchitecture, layers: int) -> dict[str, StoredTensor]:
    out: dict[str, GGUFTensor] = {}
    for stored in model.tensors.values():
        for name, tensor in architecture.list_checkpoint_tensors(stored, layers):
            if name in out:
                raise ModelFileError(f"{model.path} has two tensors for {name}")
            out[name] = tensor
    joined = join_latents(out)
    return dict(sorted(joined.items(), key=lambda item: (-DTYPE_BYTES[_checkpoint_dtype(item[1])], item[0])))


def _checkpoint_dtype(tensor: StoredTensor) -> str:
    return tensor.type.name if tensor.type.name in ("F32", "F16") else "BF16"


def _torch_dtype(tensors: dict[str, StoredTensor]) -> str:
    dtypes = {_checkpoint_dtype(t) for t in tensors.values() if len(t.shape) > 1}
    return "bfloat16" if "BF16" in dtypes else "float16" if "F16" in dtypes else "float32"


def _iter_all_tensor_bytes(
    model: GGUFModel, tensors: dict[str, StoredTensor], permuted: dict[str, int], norm_offset: float
) -> Iterator[bytes]:
    """Yield the bytes of all tensors. `permuted`: the number of heads of tensors that are stored as rotary pairs."""
    for tensor in tensors.values():
        if isinstance(tensor, JoinedLatents):
            yield tensor.read(model)
        elif norm_offset and tensor.name.endswith("norm.weight"):
            yield _subtract_offset(model, tensor, norm_offset)
        else:
            yield from _iter_tensor_bytes(model, tensor, permuted.get(tensor.name.split(".")[-2]))


def _subtract_offset(model: GGUFModel, tensor: GGUFTensor, offset: float) -> bytes:
    if tensor.type.name != "F32":
        raise UnsupportedModel(f"GGUF tensor {tensor.name!r} must have the type F32, not {tensor.type.name}")
    values = np.frombuffer(model.raw_bytes(tensor), dtype="<f4")
    return (values - np.float32(offset)).astype("<f4").tobytes()


def _iter_tensor_bytes(model: GGUFModel, tensor: GGUFTensor, permuted_heads: int | None) -> Iterator[bytes]:
    """Yield the tensor's bytes in the checkpoint's dtype, a batch of rows at a time.

    Every GGUF format codes each row separately. So attention heads can be reordered as raw bytes before dequantisation.
    """
    row_bytes = tensor.shape[-1] // tensor.type.block_elements * tensor.type.block_bytes
    rows = np.frombuffer(model.raw_bytes(tensor), dtype=np.uint8)
    if permuted_heads is not None:
        unit = row_bytes if len(tensor.shape) > 1 else tensor.type.block_bytes
        rows = _reorder_rotary_rows(rows.reshape(-1, unit), permuted_heads, tensor.name)
    rows = rows.reshape(-1, row_bytes)
    batch = max(1, CHUNK_BYTES // (4 * tensor.shape[-1]))
    for start in range(0, len(rows), batch):
        yield _encode_rows(np.ascontiguousarray(rows[start : start + batch]), tensor)


def _encode_rows(rows: np.ndarray[Any, np.dtype[np.uint8]], tensor: GGUFTensor) -> bytes:
    if tensor.type.name in ("F32", "F16", "BF16"):
        return rows.tobytes()
    values = dequantise(rows.data.cast("B"), tensor.type.name, tensor.type.block_bytes)
    return round_to_bf16(values).astype("<u2", copy=False).tobytes()


def _reorder_rotary_rows(
    rows: np.ndarray[Any, np.dtype[np.uint8]], heads: int, name: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Reorder rows from llama.cpp's layout (rotary pairs side by side) to the usual one (first halves first)."""
    if heads < 1 or len(rows) % (2 * heads):
        raise ModelFileError(
            f"GGUF tensor {name} has {len(rows)} rows, which cannot be divided evenly among {heads} heads"
        )
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write_text(path, json.dumps(value, ensure_ascii=False, indent=2))


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
