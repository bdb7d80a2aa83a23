"""StepCost: how long a step with a given number of tokens takes, learned from the steps so far.

Clock rates and context lengths change the duration of all steps alike: if steps of one size become faster, those of
other sizes, which were measured earlier, are assumed to be as much faster now. Otherwise a size measured at a bad time
would not be used again."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

import numpy as np

SAMPLES = 3  # newest times of each number of tokens, of which the median counts
MAX_AGE_STEPS = 2000  # after which a number of tokens counts as unknown: contexts grow and the load changes
# Assumed cost of one more token of each request, as a fraction of a step, beyond the largest known number of tokens. It
# is low, so that larger drafts are tried once and then measured.
OPTIMISTIC_SLOPE = 0.02


class StepCost:
    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}  # by number of tokens, in units of `_scale`
        self._scale = 1.0  # seconds
        self._recorded_at: dict[int, int] = {}  # by number of tokens: step of the newest sample
        self._tokens: list[int] = []  # known numbers of tokens, sorted
        self._medians: list[float] = []  # of the samples of each of them
        self._step = 0

    def record(self, tokens: int, seconds: float) -> None:
        self._step += 1
        at, value = bisect_left(self._tokens, tokens), seconds / self._scale
        if tokens not in self._samples:
            self._samples[tokens] = deque([value], SAMPLES)
            self._tokens.insert(at, tokens)
            self._medians.insert(at, value)
        else:
            samples = self._samples[tokens]
            samples.append(value)
            change = median(samples) / self._medians[at]
            self._scale *= change
            self._samples[tokens] = deque((sample / change for sample in samples), SAMPLES)
        self._recorded_at[tokens] = self._step
        if self._step % MAX_AGE_STEPS == 0:
            self._drop_old_samples()

    def estimate(self, start: int, count: int) -> np.ndarray:
        """Return the estimated seconds of steps with `start`, `start` + 1, ... tokens, `count` of them.

        `start`: the number of requests, each of which has one token without a draft.
        Between measured sizes the estimate is interpolated. Smaller steps take as long as the smallest measured one,
        and larger ones a little longer than the largest. Before any measurement, all steps take 1 s."""
        tokens = np.arange(start, start + count)
        if not self._tokens:
            return np.ones(count)
        largest = self._tokens[-1]
        seconds = self._scale * np.interp(tokens, self._tokens, self._medians)
        return seconds * (1 + OPTIMISTIC_SLOPE * np.maximum(tokens - largest, 0) / start)

    def _drop_old_samples(self) -> None:
        for tokens in [t for t, step in self._recorded_at.items() if step <= self._step - MAX_AGE_STEPS]:
            del self._samples[tokens], self._recorded_at[tokens]
        self._tokens = sorted(self._samples)
        self._medians = [median(self._samples[tokens]) for tokens in self._tokens]
