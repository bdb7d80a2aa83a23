"""StepCost: how long a step with a given number of tokens takes, learned from the steps so far."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

SAMPLES = 5  # newest times of each number of tokens, of which the median counts
MAX_AGE_STEPS = 2000  # after which a number of tokens counts as unknown: contexts grow and the load changes
# Assumed cost of one more token, as a fraction of a step, beyond the largest known number of tokens. It is low, so that
# larger drafts are tried once and then measured.
OPTIMISTIC_SLOPE = 0.02


class StepCost:
    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}  # by number of tokens
        self._recorded_at: dict[int, int] = {}  # by number of tokens: step of the newest sample
        self._known: list[int] = []  # sorted
        self._step = 0

    def record(self, tokens: int, seconds: float) -> None:
        self._step += 1
        if tokens not in self._samples:
            self._samples[tokens] = deque(maxlen=SAMPLES)
            insort(self._known, tokens)
        self._samples[tokens].append(seconds)
        self._recorded_at[tokens] = self._step
        if self._step % MAX_AGE_STEPS == 0:
            self._drop_old_samples()

    def estimate(self, tokens: int) -> float:
        """Return the estimated seconds of a step, between those of the next smaller and larger known steps.

        Return 1.0 if nothing is known yet."""
        known = self._known
        if not known:
            return 1.0
        at = bisect_left(known, tokens)
        if at == len(known):
            return self._seconds(known[-1]) * (1 + OPTIMISTIC_SLOPE * (tokens - known[-1]))
        above = self._seconds(known[at])
        if at == 0 or known[at] == tokens:
            return above
        below, share = self._seconds(known[at - 1]), (tokens - known[at - 1]) / (known[at] - known[at - 1])
        return below + (above - below) * share

    def _seconds(self, tokens: int) -> float:
        return median(self._samples[tokens])

    def _drop_old_samples(self) -> None:
        for tokens in [t for t, step in self._recorded_at.items() if step <= self._step - MAX_AGE_STEPS]:
            del self._samples[tokens], self._recorded_at[tokens]
            self._known.remove(tokens)
