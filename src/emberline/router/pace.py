"""PrefillRate: a worker's prompt tokens per second, from the counters of its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2  # in the moving average


@dataclass(slots=True)
class Pace:
    rate: float = 0.0  # 0: not known yet
    _tokens: int = 0  # counters of the last report
    _seconds: float = 0.0

    def reported(self, tokens: int, seconds: float) -> int:
        """Update the rate and return the tokens computed since the last report.

        `tokens` and `seconds` count from the engine's start; 0 is returned if the engine was restarted."""
        new_tokens, new_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens, self._seconds = tokens, seconds
        if new_tokens <= 0 or new_seconds <= 0:
            return 0
        self.rate += (WEIGHT if self.rate else 1.0) * (new_tokens / new_seconds - self.rate)
        return new_tokens
