"""With `exact`, an engine on a GPU gives the same tokens and log-probabilities in any batch, with or without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import tiny
import torch
from draft_oracle import DraftOracle
from gpu_settings import gpu_config, needs_hopper_kernels

from emberline.core.errors import UnsupportedModel
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.speculation.drafter import Drafter

pytestmark = needs_hopper_kernels

VOCAB = 32000
MODELS = {
    "llama": tiny.config("llama", **tiny.LARGE_VOCAB_SIZES),
    "qwen2": tiny.config("qwen2", **tiny.LARGE_VOCAB_SIZES),  # has a bias in qkv
    "mistral": tiny.config("mistral", sliding_window=100, **tiny.LARGE_VOCAB_SIZES),
}
VARIANTS: list[dict[str, object]] = [
    {},
    {"graphs": False},
    {"max_batch_tokens": 129},  # many chunks
    {"weights": "packed"},
    {"weights": "both", "overlap": False},
]
Result = dict[str, tuple[list[int], list[tuple[float, list[tuple[int, float]]]]]]  # tokens and log-probabilities


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.write(tmp_path_factory.mktemp(request.param), MODELS[request.param]))


def make_engine(checkpoint: Path, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 64, "max_batch_tokens": 1024, "max_context": 2048, "kv_tokens": 64 * 1024, "exact": True}
    return boot_from_checkpoint(checkpoint, gpu_config(**(chosen | settings)), dtype=torch.bfloat16).engine


def make_submissions() -> list[Submission]:
    rng = random.Random(3)
    free = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=3)
    kinds = [free, replace(free, temperature=1.0, seed=9), replace(free, temperature=0.8, top_k=40, seed=2)]
    lengths = (1, 2, 33, 64, 65, 129, 257, 500, 511, 512, 513, 700, 1025)
    return [
        Submission(f"{length}-{i}", [rng.randrange(3, VOCAB) for _ in range(length)], params)
        for length, (i, params) in product(lengths, enumerate(kinds))
    ]


def run(engine: Engine, submissions: Sequence[Submission], steps_between: int = 0) -> Result:
    """Add the submissions, `steps_between` steps apart, and run them to their ends."""
    outputs: list[Output] = []
    for submission in submissions:
        engine.add(submission)
        for _ in range(steps_between):
            outputs += engine.step()
    while not engine.idle:
        outputs += engine.step()
    engine.step()  # the runner drops the requests, so that their ids can be used again
    result: Result = {}
    for output in outputs:
        assert output.error is None
        tokens, scores = result.setdefault(output.id, ([], []))
        tokens += output.tokens
        scores += [(one.logprob, one.top) for one in output.logprobs]
    return result


def test_batch_and_drafts_never_change_the_bits(checkpoint: Path, request: pytest.FixtureRequest) -> None:
    submissions = make_submissions()
    single = make_engine(checkpoint, max_running=1, prefix_cache=False)
    alone: Result = {}
    for submission in submissions:
        alone |= run(single, [submission])
    expected = {(name, 0): tokens for name, (tokens, _) in alone.items()}
    is_llama = "llama" in request.node.callspec.id
    for settings in VARIANTS if is_llama else VARIANTS[:1]:
        engine = make_engine(checkpoint, prefix_cache=False, speculate="ngram", max_draft=6, **settings)
        engine.scheduler.drafter = None
        for steps in (0, 2):
            assert run(engine, submissions, steps) == alone, (settings, steps)
        for right in ((True,), (True, True, False), (False,)):
            drafter = Drafter([DraftOracle(expected, right, VOCAB)], 6, max_rows=64, adaptive=False)
            engine.scheduler.drafter = drafter
            assert run(engine, submissions, 1) == alone, (settings, right)
            assert drafter.drafted_tokens > 0
            assert drafter.accepted_tokens > 100 or not any(right)


def test_cached_prompts_have_the_same_bits(checkpoint: Path) -> None:
    """A prompt of which all but one token are cached is computed as the whole prompt is."""
    submissions = [s for s in make_submissions() if len(s.prompt) in (65, 129, 257, 513)]
    engine = make_engine(checkpoint)
    first = run(engine, submissions)
    assert run(engine, submissions, 1) == first


def test_unsupported_model_is_rejected(tmp_path: Path) -> None:
    odd = tiny.write(tmp_path, tiny.config("llama", **(tiny.LARGE_VOCAB_SIZES | {"vocab_size": 32001})))
    with pytest.raises(UnsupportedModel, match="32001 x 512"):
        make_engine(Path(odd))
