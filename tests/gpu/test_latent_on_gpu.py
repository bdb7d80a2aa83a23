"""Latent attention on a GPU: the kernels against float64, and DeepSeek models in the engine against a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_oracle import DraftOracle
from engine_runs import run_engine
from gpu_settings import gpu_config, short_starts
from latent_cases import FP8, LITE, TINY, LatentCase, Sizes
from tiny_deepseek import DEEPSEEK, LITE_SIZES, write_deepseek
from torch import Tensor

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.drafter.target import TargetStates
from emberline.engine.speculation.drafter import Drafter
from emberline.kernels import ops, work_limits
from emberline.models.loader import load_decoder

__all__ = ["short_starts"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16, F32 = torch.bfloat16, torch.float32
SMALL_LITE = LITE_SIZES | {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
SMALL_LITE |= {"intermediate_size": 512, "max_position_embeddings": 2048}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


DECODE = [(0, 1), (63, 1), (64, 1), (640, 1), (3000, 1)]


@pytest.mark.parametrize(("heads", "cache"), [(16, BF16), (16, FP8), (20, BF16), (128, BF16), (128, FP8)])
def test_decode(heads: int, cache: torch.dtype) -> None:
    LatentCase.make(LITE._replace(heads=heads), DECODE, [], BF16, cache, "cuda").check()


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 200])
def test_decode_of_many_rows(rows: int) -> None:
    LatentCase.make(LITE, [(37 * row % 900, 1) for row in range(rows)], [], BF16, BF16, "cuda").check()


@pytest.mark.parametrize("heads", [16, 128])
def test_rows_of_two_queries(heads: int) -> None:
    decode = [(0, 2), (63, 1), (640, 2), (1000, 1)]
    LatentCase.make(LITE._replace(heads=heads), decode, [], BF16, BF16, "cuda").check(max_queries=2)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("chunks", [[(0, 300)], [(0, 128), (0, 1), (0, 33)], [(700, 130), (0, 5), (64, 2)]])
@pytest.mark.parametrize(("heads", "cache"), [(16, BF16), (16, FP8), (20, BF16)])
def test_chunks(heads: int, chunks: list[tuple[int, int]], is_captured: bool, cache: torch.dtype) -> None:
    case = LatentCase.make(LITE._replace(heads=heads), [(500, 1), (3, 1)], chunks, BF16, cache, "cuda")
    case.check(is_captured=is_captured)


@pytest.mark.parametrize("cache", [BF16, FP8])
def test_passes_over_cached_tokens(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_limits, "MAX_EXPANDED_HEADS", 16 * 64 * 10)
    chunks = [(1000, 300), (0, 5), (64, 20), (700, 1)]
    LatentCase.make(LITE, [(500, 1)], chunks, BF16, cache, "cuda").check(has_passes=True)


@pytest.mark.parametrize(
    ("sizes", "dtype", "cache"),
    [
        (TINY, F32, F32),
        (TINY, BF16, BF16),
        (Sizes(5, 40, 16, 100, 24), F32, BF16),
        (Sizes(5, 40, 16, 100, 24), BF16, BF16),
    ],
)
def test_odd_sizes(sizes: Sizes, dtype: torch.dtype, cache: torch.dtype) -> None:
    case = LatentCase.make(sizes, [(70, 1), (5, 1)], [(0, 40), (33, 9)], dtype, cache, "cuda", block=16)
    case.check(is_captured=True)


@pytest.fixture
def reference() -> Iterator[None]:
    ops.start_backend(native=False)
    yield
    ops.start_backend()


def compute_logits(directory: Path, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return the logits from which each of the tokens behind the prompt is sampled, in float32 on the CPU."""
    ids = np.array([*prompt, *tokens[:-1]])
    states = TargetStates(load_decoder(directory, "float32"), (0,), len(ids))
    ((_, logits),) = states.compute([ids], [range(len(prompt) - 1, len(ids))])
    return logits


def submissions(prompts: list[list[int]], **settings: int) -> list[Submission]:
    params = SamplingParams(temperature=0.0, ignore_eos=True, **settings)
    return [Submission(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


def make_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(4)
    shared = random.integers(3, 131, 64).tolist()  # so that some requests find cached blocks
    return [(shared + random.integers(3, 131, length).tolist())[:length] for length in lengths]


@pytest.mark.parametrize("name", DEEPSEEK)
def test_engine_generates_the_tokens_of_a_cpu(name: str, tmp_path: Path, reference: None) -> None:
    """In float32 rounding errors are smaller than the differences between logits.

    Steps are captured, and some chunks have cached tokens before them."""
    from emberline.engine.gpu.boot import boot_from_checkpoint

    directory, prompts = write_deepseek(tmp_path, name, max_position_embeddings=512), make_prompts(3, 130, 300, 64, 90)
    settings = {"max_running": 8, "max_batch_tokens": 256, "max_context": 512, "kv_tokens": 8192}
    booted = boot_from_checkpoint(directory, gpu_config(**settings), dtype=F32)
    ours = run_engine(booted.engine, submissions(prompts, max_tokens=20), steps_between=2)
    captured = booted.runner._graphs.captured
    assert any(shape.chunks for shape in captured) and any(not shape.chunks for shape in captured)
    assert not booted.runner._graphs.capture_failed
    for i, prompt in enumerate(prompts):
        tokens = ours[f"r{i}"]
        assert compute_logits(directory, prompt, tokens).argmax(-1).tolist() == tokens


def test_drafts_do_not_change_tokens(tmp_path: Path) -> None:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    directory, prompts = write_deepseek(tmp_path, "v2", max_position_embeddings=512), make_prompts(3, 130, 64)
    settings = {"max_running": 8, "max_batch_tokens": 256, "max_context": 512, "kv_tokens": 8192}
    plain = boot_from_checkpoint(directory, gpu_config(**settings), dtype=F32).engine
    expected = run_engine(plain, submissions(prompts, max_tokens=30))
    engine = boot_from_checkpoint(directory, gpu_config(**settings, speculate="ngram", max_draft=4), dtype=F32).engine
    oracle = DraftOracle({(name, 0): tokens for name, tokens in expected.items()}, (True, True, False), 131)
    engine.scheduler.drafter = Drafter([oracle], 4, max_rows=8, adaptive=False)
    assert run_engine(engine, submissions(prompts, max_tokens=30), steps_between=1) == expected
    assert engine.scheduler.drafter.accepted_tokens > 20


@pytest.mark.parametrize(("kv_dtype", "bound"), [("auto", 0.2), ("float8", 0.8)])
def test_engine_with_sizes_of_a_real_model(kv_dtype: str, bound: float, tmp_path: Path, reference: None) -> None:
    """Log-probabilities in bfloat16 behind chunked prompts are near those of the CPU.

    A tiny model is sensitive to rounding: transformers in bfloat16 is off by 0.07; wrong attention is off by 2."""
    from emberline.engine.gpu.boot import boot_from_checkpoint

    directory = write_deepseek(tmp_path, "v2-lite", dtype=BF16, **SMALL_LITE)
    settings = {"max_running": 8, "max_batch_tokens": 512, "max_context": 1024, "kv_tokens": 8192, "kv_dtype": kv_dtype}
    engine, prompts = boot_from_checkpoint(directory, gpu_config(**settings)).engine, make_prompts(600, 70, 5)
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[float]] = {}
    for submission in submissions(prompts, max_tokens=16, logprobs=0):
        engine.add(submission)
    while not engine.idle:
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
            scores.setdefault(output.id, []).extend(one.logprob for one in output.logprobs)
    for i, prompt in enumerate(prompts):
        logits = compute_logits(directory, prompt, tokens[f"r{i}"]).log_softmax(-1)
        expected = logits.gather(1, torch.tensor(tokens[f"r{i}"])[:, None])[:, 0]
        error = (torch.tensor(scores[f"r{i}"]) - expected).abs().mean()
        assert error < bound, f"{error} with a prompt of {len(prompt)} tokens"
