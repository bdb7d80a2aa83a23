"""PrefillRate: a worker's prompt tokens per second, from the counters of its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

NEW_REPORT_WEIGHT = 0.2  # in the moving average


@dataclass(slots=True)
class PrefillRate:
    tokens_per_s: float = 0.0  # 0: not known yet
    _tokens: int = 0  # counters of the last report
    _seconds: float = 0.0

    def record_report(self, tokens: int, seconds: float) -> int:
        """Update the rate and return the tokens computed since the last report.

        `tokens` and `seconds` count from the engine's start; 0 is returned if the engine was restarted."""
        new_tokens, new_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens, self._seconds = tokens, seconds
        if new_tokens <= 0 or new_seconds <= 0:
            return 0
        self.tokens_per_s += (NEW_REPORT_WEIGHT if self.tokens_per_s else 1.0) * (
            new_tokens / new_seconds - self.tokens_per_s
        )
        return new_tokens
