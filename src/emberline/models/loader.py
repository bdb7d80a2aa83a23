"""load: a checkpoint directory becomes a Decoder, or a typed error that says which tensor or field is wrong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder import Decoder
from emberline.models.rope import inverse_frequencies
from emberline.models.weights import Weights
from emberline.unweight.codec import codec_of
from emberline.unweight.format import Bytes
from emberline.unweight.tensor import CodedTensor, is_coded

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
IGNORABLE = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq"
SAMPLE = 1024  # bytes read at each end and in the middle of a tensor


def load(directory: Path, dtype: str = "auto", max_context: int | None = None) -> Decoder:
    """`auto` keeps the dtype of the file; float16 widens. Positions are [0, max_context), by default the config's."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}", param="dtype")
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.of(checkpoint)
    context = config.max_context if max_context is None else max_context
    if not 1 <= context <= config.longest_context:
        raise InvalidRequest(
            f"max_context is {context}; this model allows 1 to {config.longest_context}", param="max_context"
        )
    weights = Weights(checkpoint, DTYPES[dtype])
    decoder = Decoder.load(config, weights, context, "")
    weights.finish(IGNORABLE)
    used = str(decoder.dtype).removeprefix("torch.")  # not as asked: auto and its outcome are the same numbers
    return replace(decoder, fingerprint=fingerprint(checkpoint, config, used, context))


def fingerprint(checkpoint: Checkpoint, config: ModelConfig, dtype: str, context: int) -> str:
    """Equal for equal models, packed or not, so that keys and values of one are never taken for another's. Samples each
    tensor: cheap, and training a model further changes every matrix it touches everywhere."""
    digest = hashlib.sha256(repr((replace(config, max_context=0, eos=()), dtype)).encode())
    digest.update(inverse_frequencies(config.rope, context).numpy().tobytes())
    files: dict[Path, int] = {}
    try:
        for name, info in sorted(checkpoint.tensors.items()):
            digest.update(f"{name}|{info.dtype}|{info.shape}|".encode())
            if info.file not in files:
                files[info.file] = os.open(info.file, os.O_RDONLY)
            read, size = _reader(name, info, files[info.file]), info.logical_bytes
            for part in (0, size // 2, max(0, size - SAMPLE)):
                digest.update(read(part, min(part + SAMPLE, size)).data)
    except OSError as e:
        raise ModelFileError(f"cannot read {checkpoint.directory}: {e.strerror or e}") from e
    finally:
        for handle in files.values():
            os.close(handle)
    return digest.hexdigest()[:32]


def _reader(name: str, info: TensorInfo, handle: int) -> Callable[[int, int], Bytes]:
    """Bytes of a tensor; of a coded one, only the blocks that hold them are decoded."""

    def fetch(begin: int, end: int) -> Bytes:
        return np.frombuffer(os.pread(handle, end - begin, info.offset + begin), np.uint8)

    if not is_coded(info):
        return fetch
    return partial(CodedTensor.open(name, info, fetch, codec_of(ops.describe().library)).read, fetch)
