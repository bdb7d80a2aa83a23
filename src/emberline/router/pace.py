"""Pace: how many tokens of prompts a worker computes in a second, as what it reports tells."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2  # of the newest report


@dataclass(slots=True)
class Pace:
    rate: float = 0.0  # tokens a second; 0: nothing is known
    _tokens: int = 0  # as last reported
    _seconds: float = 0.0

    def reported(self, tokens: int, seconds: float) -> int:
        """Both since its engine's start: computed, and spent computing. How many tokens are new; 0 if it has begun
        again."""
        more, took = tokens - self._tokens, seconds - self._seconds
        self._tokens, self._seconds = tokens, seconds
        if more <= 0 or took <= 0:
            return 0
        self.rate += (WEIGHT if self.rate else 1.0) * (more / took - self.rate)
        return more
