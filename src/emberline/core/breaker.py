"""CircuitBreaker: stops sending requests to a server that keeps failing.

A breaker starts closed, which means that requests are sent. Several failures in a row open it: no requests are sent
for a pause, which doubles each time. After the pause, the outcome of one trial request decides whether the breaker
closes or stays open."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAUSE_S = 30.0  # seconds


@dataclass(slots=True)
class CircuitBreaker:
    failure_limit: int = 3  # failures in a row that open the breaker
    first_pause_s: float = 1.0  # seconds; each further pause is twice as long
    failures: int = 0
    times_opened: int = 0  # times it opened since the last success
    retry_at: float = 0.0  # time at which the next trial may start, also while another trial is still running
    is_trial_running: bool = False

    def allows_request(self, now: float) -> bool:
        return not self.times_opened or now >= self.retry_at

    def record_start(self, now: float) -> None:
        assert self.allows_request(now)
        if self.times_opened:  # a trial can take very long: after the pause another one may start
            self.is_trial_running, self.retry_at = True, now + MAX_PAUSE_S

    def record_success(self) -> None:
        self.failures = self.times_opened = 0
        self.is_trial_running = False

    def record_failure(self, now: float) -> None:
        self.failures += 1
        if self.times_opened and not self.is_trial_running:
            return  # the request started before the breaker opened: this failure is already counted
        if self.is_trial_running or self.failures >= self.failure_limit:
            self.retry_at = now + min(MAX_PAUSE_S, self.first_pause_s * 2**self.times_opened)
            self.times_opened += 1
        self.is_trial_running = False

    def record_cancellation(self) -> None:
        """Record that the client disconnected before the request showed whether the server works."""
        if self.is_trial_running:
            self.is_trial_running, self.retry_at = False, 0.0

    @property
    def state(self) -> str:
        return "closed" if not self.times_opened else "trying" if self.is_trial_running else "open"
