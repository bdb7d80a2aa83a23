"""Models of families that differ from Llama, on a GPU: the logits of the CPU's reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_families
import torch
from sink_model import SinkModel
from torch import Tensor

from emberline.drafter.target import TargetStates
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.device_weights import DeviceWeights
from emberline.models.loader import load_decoder
from emberline.models.tensor_names import IGNORABLE_TENSORS, load_model
from emberline.models.weights import Weights

LENGTHS = (37, 21, 20, 50)
CHUNK, CHUNKED_LENGTHS = (
    64,
    (37, 150),
)  # on a GPU a chunk is a multiple of 64 tokens, and one request has several chunks


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    yield
    ops.start_backend()


def load_on(
    device: str, checkpoint: Checkpoint, dtype: torch.dtype, config: ModelConfig | None = None, context: int = 64
) -> DecoderModel:
    weights = DeviceWeights(checkpoint, dtype, device)
    model = load_model(config or ModelConfig.from_checkpoint(checkpoint), weights, context)
    weights.finish(IGNORABLE_TENSORS)
    return model


def compute_logits(model: DecoderModel, vocab: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    random = np.random.default_rng(1)
    sequences = [random.integers(0, vocab, length) for length in lengths]
    states = TargetStates(model, (0,), max(64, *lengths))
    spans = [range(length) for length in lengths]
    return torch.cat([logits.float().cpu() for _, logits in states.compute(sequences, spans)])


DTYPES = pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)


def check_logits(ours: Tensor, theirs: Tensor, bound: float) -> None:
    """Check the largest error, or in bfloat16 the mean one, since rounding has large effects in a tiny model."""
    error = (ours - theirs).abs() / theirs.abs().max()
    assert float(error.max() if bound < 0.01 else error.mean()) < bound


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@DTYPES
@pytest.mark.parametrize("name", [name for name in tiny_families.CONFIGS if not name.startswith("llama4")])
def test_logits_equal_those_of_the_cpu(name: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    directory = tiny_families.write(tmp_path, name, dtype=dtype)
    ops.start_backend(native=False)
    theirs = compute_logits(load_decoder(directory, "float32"), 131)
    check_logits(compute_logits(load_on("cuda", Checkpoint.open(directory), dtype), 131), theirs, bound)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@DTYPES
@pytest.mark.parametrize("name", [name for name in tiny_families.CONFIGS if name.startswith("llama4")])
def test_logits_with_chunks_equal_those_of_the_cpu(name: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    directory = tiny_families.write(
        tmp_path, name, dtype=dtype, attention_chunk_size=CHUNK, max_position_embeddings=4 * CHUNK
    )
    ops.start_backend(native=False)
    theirs = compute_logits(load_decoder(directory, "float32"), 131, CHUNKED_LENGTHS)
    on_gpu = load_on("cuda", Checkpoint.open(directory), dtype, context=4 * CHUNK)
    check_logits(compute_logits(on_gpu, 131, CHUNKED_LENGTHS), theirs, bound)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@DTYPES
def test_logits_with_sinks_equal_those_of_the_cpu(dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    case = SinkModel(tmp_path, dtype)
    ops.start_backend(native=False)
    weights = Weights(case.checkpoint, torch.float32)
    on_cpu = load_model(case.config, weights, 64)
    weights.finish("")
    ours = compute_logits(load_on("cuda", case.checkpoint, dtype, case.config), 131)
    check_logits(ours, compute_logits(on_cpu, 131), bound)
