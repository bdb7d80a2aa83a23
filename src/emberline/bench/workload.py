"""Requests with random lengths and tokens from a fixed seed, so that every engine serves the same requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from emberline.bench.job import BenchJob

CONTEXT, STEPS = 128, 64  # of a decode measurement


class LogNormal(NamedTuple):
    mean: float  # of the logarithm
    sigma: float
    maximum: int


def draw_random_tokens(count: int, rng: np.random.Generator, vocab_size: int) -> list[int]:
    return [int(t) for t in rng.integers(1, vocab_size, count)]


def make_prefill_job(prompt_tokens: int, vocab_size: int) -> BenchJob:
    return make_job([(prompt_tokens, 1)], vocab_size)


def make_decode_job(
    batch_size: int, vocab_size: int, context_tokens: int = CONTEXT, decode_steps: int = STEPS
) -> BenchJob:
    return make_job(
        [(context_tokens, decode_steps + 1)] * batch_size, vocab_size
    )  # the first token is part of the prefill


def make_mixed_job(count: int, vocab_size: int) -> BenchJob:
    """Return a job with a mix of short and long requests."""
    return make_job(draw_lognormal_lengths(count, LogNormal(4.5, 0.8, 512), LogNormal(4.0, 0.6, 128)), vocab_size)


def draw_chat_lengths(count: int = 1000, seed: int = 0) -> list[tuple[int, int]]:
    """Return the lengths (prompt, output) of requests that resemble shared conversations."""
    return draw_lognormal_lengths(count, LogNormal(5.0, 1.1, 3500), LogNormal(5.1, 0.8, 1024), seed)


def draw_lognormal_lengths(count: int, prompt: LogNormal, output: LogNormal, seed: int = 0) -> list[tuple[int, int]]:
    """Return lengths (prompt, output) from two log-normal distributions. Every length is at least 8.

    The lengths of all prompts are drawn before those of all outputs.
    """
    rng = np.random.default_rng(seed)
    drawn = [np.clip(rng.lognormal(mean, sigma, count), 8, most).astype(int) for mean, sigma, most in (prompt, output)]
    return list(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True))


def make_job(lengths: Iterable[tuple[int, int]], vocab_size: int, seed: int = 0) -> BenchJob:
    rng = np.random.default_rng(seed)
    pairs = [(draw_random_tokens(prompt, rng, vocab_size), output) for prompt, output in lengths]
    return BenchJob([prompt for prompt, _ in pairs], [output for _, output in pairs])
