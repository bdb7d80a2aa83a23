"""load_decoder: loads a model from a checkpoint directory, for a CPU."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.hub.tensorfile import TensorInfo
from emberline.kernels import ops
from emberline.kernels.comm.communicator import Communicator
from emberline.models.attention_parts import LLAMA_ATTENTION
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.decoder_parts import LLAMA_PARTS
from emberline.models.expertsconfig import NO_OPTIONS
from emberline.models.rope import compute_inverse_frequencies
from emberline.models.shard import Shard
from emberline.models.stage import Stage
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weight_dtype import choose_weight_dtype
from emberline.models.weight_form import WeightForm, choose_weight_form
from emberline.models.weights import Weights
from emberline.unweight.codec import select_weight_codec
from emberline.unweight.format import Bytes
from emberline.unweight.tensor import CodedTensor, is_coded

DTYPES = {"auto": None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAMPLE_BYTES = 1024  # bytes read at each end and in the middle of a tensor


def load_decoder(directory: Path, dtype: str = "auto", max_context: int | None = None) -> DecoderModel:
    """Load a model from a checkpoint directory, as `load_checkpoint` does."""
    return load_checkpoint(Checkpoint.open(directory), dtype, max_context)


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    max_context: int | None = None,
    form: WeightForm | None = None,
    stage: Stage | None = None,
    shard: Shard | None = None,
    comm: Communicator | None = None,
) -> DecoderModel:
    """Load a model for sequences of up to `max_context` tokens, by default the context of its config.

    With dtype `auto` the weights keep the dtype of the file, except that float16 becomes bfloat16. `form`: how
    matrices are kept in memory; None: as in the file. `stage`: load only the layers of this stage of a pipeline.
    `shard`: load only this part of each layer; `comm` connects the ranks that have the other parts.
    """
    form = form or choose_weight_form(checkpoint, dtype)
    choose_weight_dtype(checkpoint, dtype, on_gpu=False)
    config = ModelConfig.from_checkpoint(checkpoint)
    context = config.max_context if max_context is None else max_context
    if not 1 <= context <= config.longest_context:
        raise InvalidRequest(
            f"max_context is {context}; this model allows 1 to {config.longest_context}", param="max_context"
        )
    weights = Weights(checkpoint, DTYPES[dtype], form=form, shard=shard, comm=comm)
    rank_config = config if shard is None else shard.shard_config(config)
    decoder = load_model(rank_config, weights, context, stage)
    weights.finish(ignorable_tensors(config, stage))
    used = str(decoder.dtype).removeprefix("torch.")  # not `dtype`, which may be auto: equal weights hash equally
    kept = used if form == "plain" else f"{used} {form}"  # products of quantised weights round inputs in another way
    return replace(decoder, fingerprint=compute_fingerprint(checkpoint, config, kept, context))


def compute_fingerprint(checkpoint: Checkpoint, config: ModelConfig, dtype: str, context: int) -> str:
    """Return a hash of the model, which is part of the keys of its KV blocks. Packing does not change it.

    To be fast, it hashes only samples of each tensor; training changes a matrix everywhere, so the samples differ. The
    names of ModelConfig, of its nested configs and of their fields are hashed through `repr`: renaming one would
    invalidate all stored KV blocks.
    """
    digest = hashlib.sha256(repr((replace(config, max_context=0, eos=()), dtype)).encode())
    digest.update(compute_inverse_frequencies(config.rope, context).numpy().tobytes())
    if config.parts != LLAMA_PARTS:
        digest.update(repr(config.parts).encode())
    if config.experts is not None and config.experts.options != NO_OPTIONS:
        digest.update(repr(config.experts.options).encode())
    if config.parts.attention != LLAMA_ATTENTION:
        digest.update(repr(config.parts.attention).encode())
    if (state := config.parts.attention.state) is not None:
        digest.update(repr((state, config.parts.attention.state_layers)).encode())
    files: dict[Path, int] = {}
    try:
        for name, info in _list_stored_tensors(checkpoint):
            stored_type = f" {info.block_type.name}" if isinstance(info, GGUFTensorInfo) else ""
            digest.update(f"{name}|{info.dtype}{stored_type}|{info.shape}|".encode())
            if info.file not in files:
                files[info.file] = os.open(info.file, os.O_RDONLY)
            read = _make_byte_reader(name, info, files[info.file])
            size = info.nbytes if stored_type else info.logical_bytes
            for part in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                digest.update(read(part, min(part + SAMPLE_BYTES, size)).data)
    except OSError as e:
        raise ModelFileError(f"cannot read {checkpoint.directory}: {e.strerror or e}") from e
    finally:
        for handle in files.values():
            os.close(handle)
    return digest.hexdigest()[:32]


def _list_stored_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorInfo]]:
    for name, info in sorted(checkpoint.tensors.items()):
        yield name, info
        if isinstance(info, GGUFTensorInfo) and info.latent_values is not None:
            yield name, info.latent_values


def _make_byte_reader(name: str, info: TensorInfo, file_descriptor: int) -> Callable[[int, int], Bytes]:
    """Return a function that reads bytes [begin, end) of a tensor, decoding only the blocks it needs."""

    def fetch(begin: int, end: int) -> Bytes:
        return np.frombuffer(os.pread(file_descriptor, end - begin, info.offset + begin), np.uint8)

    if not is_coded(info):
        return fetch
    return partial(CodedTensor.open(name, info, fetch, select_weight_codec(ops.current_backend().library)).read, fetch)
