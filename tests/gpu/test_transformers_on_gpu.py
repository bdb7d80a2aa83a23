"""The engine on a GPU against transformers on the same GPU: log-probabilities of every model family.

In bfloat16 both round differently, so each is compared with transformers in float32, which has the same weights.
`family_report` writes the distances to a file:

    python -m pytest -p family_report --families-json FILE tests/gpu/test_transformers_on_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
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

from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.attention_support import explain_portable_kernels
from emberline.kernels.gpu_choice import has_hopper_kernels, selected_gpu_kernels
from emberline.models.config import ModelConfig

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Limits of the largest, mean and median difference. Log-probabilities here are down to -20.
FLOAT32_LIMITS = {"largest": 5e-4, "mean": 5e-5, "median": 5e-5}
ROUNDING_FACTOR = 2.0  # of the distance that transformers has in bfloat16
ROUNDING_TERMS = {"largest": 0.02, "mean": 0.002, "median": 0.002}


@pytest.fixture(autouse=True)
def short_starts() -> Iterator[None]:
    """Capture only a few shapes at the start: the others are captured at their first use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emberline.engine.gpu.boot.CAPTURE_BUDGET_S", 0.2)
        yield


def write_checkpoint(case: FamilyCase, directory: Path) -> ModelConfig:
    case.write(directory)
    (directory / "tokenizer.json").write_text("{}")
    return ModelConfig.from_checkpoint(Checkpoint.open(directory))


def name_kernels(booted: BootedGPUEngine) -> str:
    """Return which kernels compute the attention."""
    model, shape = booted.runner.model, booted.runner.cache.shape
    config = model.config
    if config.parts.attention.latent is not None:
        return "latent"
    if not has_hopper_kernels():
        return f"portable: {selected_gpu_kernels().reason}"
    heads = config.heads, config.kv_heads, config.head_dim
    reasons = explain_portable_kernels(heads, model.dtype, shape.dtype, shape.block_size)
    return f"portable: {', '.join(dict.fromkeys(reasons.values()))}" if reasons else "hopper"


def find_limits(config: ModelConfig, dtype: torch.dtype, theirs: Distance) -> dict[str, float]:
    """Return the limits of our distance by their names in Distance.

    In bfloat16 a row that is close to the border between two experts may select the other one, and its
    log-probabilities are then off by several nats. So the median of models with experts is limited only."""
    if dtype is torch.float32:
        return FLOAT32_LIMITS
    limits = {name: ROUNDING_FACTOR * getattr(theirs, name) + term for name, term in ROUNDING_TERMS.items()}
    return limits if config.experts is None else {"median": limits["median"]}


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
    assert not case.is_wide or is_exact or kernels in ("hopper", "latent") or not has_hopper_kernels()
    for phase, (ours, peer) in found.items():
        limits = find_limits(config, dtype, peer)
        row = {"name": f"{name} {str(dtype).removeprefix('torch.')} {phase}", "kernels": kernels}
        row |= {"ours": asdict(ours), "limits": limits} | ({} if is_exact else {"peer": asdict(peer)})
        record_property("family", row)
        over += [(phase, each) for each, limit in limits.items() if not getattr(ours, each) <= limit]
    assert not over
