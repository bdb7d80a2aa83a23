"""Seeded request sets, so that every engine serves the same lengths and tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from emberline.bench.job import BenchJob

CONTEXT, STEPS = 128, 64  # of a decode measurement


def tokens(count: int, rng: np.random.Generator, vocab: int) -> list[int]:
    return [int(t) for t in rng.integers(1, vocab, count)]


def prefill(length: int, vocab: int) -> BenchJob:
    return job([(length, 1)], vocab)


def decode(batch: int, vocab: int, context: int = CONTEXT, steps: int = STEPS) -> BenchJob:
    return job([(context, steps + 1)] * batch, vocab)  # the first token is part of the prefill


def mix(count: int, vocab: int) -> BenchJob:
    """Return a mix of short and long requests, submitted at once."""
    return job(lengths(count, (4.5, 0.8, 512), (4.0, 0.6, 128)), vocab)


def chat(count: int = 1000, seed: int = 0) -> list[tuple[int, int]]:
    """Return lengths (prompt, output) that resemble shared conversations."""
    return lengths(count, (5.0, 1.1, 3500), (5.1, 0.8, 1024), seed)


def lengths(
    count: int, prompt: tuple[float, float, int], output: tuple[float, float, int], seed: int = 0
) -> list[tuple[int, int]]:
    """Return log-normal lengths (mean, sigma, maximum) of at least 8; all prompts are drawn before all outputs."""
    rng = np.random.default_rng(seed)
    drawn = [np.clip(rng.lognormal(mean, sigma, count), 8, most).astype(int) for mean, sigma, most in (prompt, output)]
    return list(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True))


def job(sizes: Iterable[tuple[int, int]], vocab: int, seed: int = 0) -> BenchJob:
    rng = np.random.default_rng(seed)
    pairs = [(tokens(prompt, rng, vocab), output) for prompt, output in sizes]
    return BenchJob([prompt for prompt, _ in pairs], [output for _, output in pairs])
