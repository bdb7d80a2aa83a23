"""The engine on a GPU against transformers on the same GPU: log-probabilities of every model family.

In bfloat16 both round differently, so each is compared with transformers in float32, which has the same weights.
`family_report` writes the distances to a file:

    python -m pytest -p family_report --families-json FILE tests/gpu/test_transformers_on_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from family_cases import CASES, FamilyCase
from gpu_settings import gpu_config
from transformers_distance import (
    Distance,
    compute_with_transformers,
    make_prompts,
    measure_distances,
    score_prompts,
)

from emberline.core.errors import UnsupportedModel
from emberline.engine.model_support import reject_on_gpu
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.attention_support import explain_portable_kernels
from emberline.models.config import ModelConfig

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLOAT32_LIMIT = 5e-4  # of the largest difference; log-probabilities here are down to -20
ROUNDING_FACTOR, ROUNDING_TERM = 2.0, 0.02  # of the distance that transformers has in bfloat16


@pytest.fixture(autouse=True)
def short_starts() -> Iterator[None]:
    """Capture only a few shapes at the start: the others are captured at their first use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
        yield


def write_checkpoint(case: FamilyCase, directory: Path) -> ModelConfig:
    """Write the checkpoint, and skip the test if the engine refuses the model on a GPU."""
    case.write(directory)
    (directory / "tokenizer.json").write_text("{}")
    config = ModelConfig.from_checkpoint(Checkpoint.open(directory))
    try:
        reject_on_gpu(config)
    except UnsupportedModel as refused:
        pytest.skip(str(refused))
    return config


def name_kernels(booted: BootedGPUEngine) -> str:
    """Return which kernels compute the attention."""
    model, shape = booted.runner.model, booted.runner.cache.shape
    config = model.config
    if config.parts.attention.latent is not None:
        return "latent"
    heads = config.heads, config.kv_heads, config.head_dim
    reasons = explain_portable_kernels(heads, model.dtype, shape.dtype, shape.block_size)
    return f"portable: {', '.join(dict.fromkeys(reasons.values()))}" if reasons else "hopper"


def find_limit(dtype: torch.dtype, theirs: Distance) -> Distance:
    if dtype is torch.float32:
        return Distance(FLOAT32_LIMIT, FLOAT32_LIMIT / 10)
    return Distance(
        ROUNDING_FACTOR * theirs.largest + ROUNDING_TERM, ROUNDING_FACTOR * theirs.mean + ROUNDING_TERM / 10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_equal_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    pytest.importorskip("transformers")
    from emberline.engine.gpu.boot import boot_from_checkpoint

    case = CASES[name]
    config = write_checkpoint(case, tmp_path)
    booted = boot_from_checkpoint(tmp_path, gpu_config(**case.settings), dtype=dtype)
    prompts = make_prompts(case.lengths, config.vocab)
    # Steps that score prompts are not captured. They come last, since they leave prompts in the cache.
    sequences = [
        each for scored in (False, True) for each in score_prompts(booted.engine, prompts, scores_prompt=scored)
    ]
    exact = compute_with_transformers(tmp_path, sequences, torch.float32, "cuda")
    is_exact = dtype is torch.float32
    theirs = exact if is_exact else compute_with_transformers(tmp_path, sequences, dtype, "cuda")
    found = measure_distances(sequences, exact, theirs)
    kernels, over = name_kernels(booted), []
    assert not case.is_wide or is_exact or kernels in ("hopper", "latent")
    for phase, (ours, peer) in found.items():
        limit = find_limit(dtype, peer)
        row = {"value": ours.largest, "limit": limit.largest, "mean": ours.mean, "mean_limit": limit.mean}
        row |= {} if is_exact else {"peer": peer.largest, "peer_mean": peer.mean}
        dtype_name = str(dtype).removeprefix("torch.")
        record_property("family", {"name": f"{name} {dtype_name} {phase}", **row, "kernels": kernels})
        if ours.largest > limit.largest or ours.mean > limit.mean:
            over.append((phase, row))
    assert not over
