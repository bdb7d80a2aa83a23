"""PrefillRate: how many prompt tokens a worker computes per second, measured from the counters in its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

NEW_REPORT_WEIGHT = 0.2  # in the moving average


@dataclass(slots=True)
class PrefillRate:
    tokens_per_s: float = 0.0  # 0: not known yet
    _tokens: int = 0  # counters of the last report
    _seconds: float = 0.0

    def record_heartbeat_counters(self, total_tokens: int, total_seconds: float) -> int:
        """Update the rate from a heartbeat, and return the number of tokens computed since the previous heartbeat.

        `total_tokens` and `total_seconds` count from the engine's start. Return 0 if the engine was restarted."""
        new_tokens, new_seconds = total_tokens - self._tokens, total_seconds - self._seconds
        self._tokens, self._seconds = total_tokens, total_seconds
        if new_tokens <= 0 or new_seconds <= 0:
            return 0
        self.tokens_per_s += (NEW_REPORT_WEIGHT if self.tokens_per_s else 1.0) * (
            new_tokens / new_seconds - self.tokens_per_s
        )
        return new_tokens
