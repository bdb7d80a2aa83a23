"""measure_distances: how far an engine's log-probabilities are from those of transformers on the same device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.core.params import MAX_LOGPROBS, SamplingParams
from emberline.core.plan import TokenLogprob
from emberline.core.request import Submission
from emberline.engine.engine import Engine

NUM_GENERATED = 12  # tokens of each request
PREFILL, DECODE = "prefill", "decode"


@dataclass
class ScoredSequence:
    """A prompt with its generated tokens, and the engine's log-probabilities of all tokens but the first."""

    prompt_length: int
    tokens: list[int]
    logprobs: list[TokenLogprob]

    @property
    def first_logprob(self) -> int:
        """The position of the first token with a log-probability."""
        return len(self.tokens) - len(self.logprobs)


@dataclass(frozen=True)
class Distance:
    """Differences of log-probabilities from those of transformers in float32."""

    largest: float
    mean: float
    median: float

    @staticmethod
    def between(values: Tensor, exact: Tensor) -> Distance:
        error = (values - exact).abs()
        return Distance(float(error.max()), float(error.mean()), float(error.median()))


def make_prompts(lengths: tuple[int, ...], vocab: int) -> list[list[int]]:
    chooser = random.Random(1)
    return [[chooser.randrange(3, vocab) for _ in range(length)] for length in lengths]


def score_prompts(engine: Engine, prompts: list[list[int]], *, scores_prompt: bool) -> list[ScoredSequence]:
    """Generate tokens after the prompts. Requests start one step apart, so that steps have chunks and single tokens.

    `scores_prompt`: whether log-probabilities of the prompts are computed too."""
    params = SamplingParams(
        max_tokens=NUM_GENERATED,
        seed=5,
        ignore_eos=True,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS if scores_prompt else None,
    )
    found = {f"r{i}": ScoredSequence(len(prompt), list(prompt), []) for i, prompt in enumerate(prompts)}
    waiting = [Submission(name, scored.tokens[:], params) for name, scored in found.items()]
    while waiting or not engine.idle:
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            scored = found[output.id]
            scored.logprobs += output.prompt_logprobs or []
            scored.logprobs += output.logprobs
            scored.tokens += output.tokens
    return list(found.values())


@contextmanager
def exact_delta_rule(model: Any) -> Iterator[None]:
    """Let recurrent layers of transformers compute token by token: its rule for chunks has larger rounding errors."""
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "torch_chunk_gated_delta_rule"):
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        yield


def compute_with_transformers(
    directory: Path, sequences: list[ScoredSequence], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Return the log-probabilities [tokens - 1, vocabulary] after each token but the last of each sequence."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.to(device).eval()
    with torch.inference_mode(), exact_delta_rule(model):
        inputs = [torch.tensor([sequence.tokens[:-1]], device=device) for sequence in sequences]
        return [model(ids).logits[0].double().log_softmax(-1).cpu() for ids in inputs]


def measure_distances(
    sequences: list[ScoredSequence], exact: list[Tensor], theirs: list[Tensor]
) -> dict[str, tuple[Distance, Distance]]:
    """Return for prefill and decode our distance from `exact`, and that of `theirs`, for the same tokens.

    The tokens are those of the sequences, and at each position the most probable ones."""
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {PREFILL: [], DECODE: []}
    for sequence, exact_rows, their_rows in zip(sequences, exact, theirs, strict=True):
        first = sequence.first_logprob
        ids, ours = [], []
        for token, scored in zip(sequence.tokens[first:], sequence.logprobs, strict=True):
            assert len(scored.top) == MAX_LOGPROBS
            ids.append([token, *(each for each, _ in scored.top)])
            ours.append([scored.logprob, *(value for _, value in scored.top)])
        at, values = torch.tensor(ids), torch.tensor(ours, dtype=torch.float64)
        rows = [each[first - 1 :].gather(1, at) for each in (exact_rows, their_rows)]
        # The first generated token is predicted by the last token of the prompt.
        split = sequence.prompt_length + 1 - first
        for phase, part in ((PREFILL, slice(0, split)), (DECODE, slice(split, None))):
            parts[phase].append((values[part], rows[0][part], rows[1][part]))
    joined = {phase: [torch.cat(each) for each in zip(*found, strict=True)] for phase, found in parts.items()}
    return {
        phase: (Distance.between(ours, exact), Distance.between(theirs, exact))
        for phase, (ours, exact, theirs) in joined.items()
    }
