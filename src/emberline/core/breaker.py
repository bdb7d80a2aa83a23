"""CircuitBreaker: stops sending requests to a server that keeps failing.

It is closed at first. Enough failures in a row open it for a pause that doubles each time, after which one trial
request decides whether it closes.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_PAUSE = 30.0  # seconds


@dataclass(slots=True)
class Breaker:
    limit: int = 3  # failures in a row that open the breaker
    pause: float = 1.0  # seconds; each further pause is twice as long
    failures: int = 0
    opened: int = 0  # times it opened since the last success
    until: float = 0.0  # time at which the next trial may start, also while another trial is still running
    trying: bool = False

    def allows(self, now: float) -> bool:
        return not self.opened or now >= self.until

    def began(self, now: float) -> None:
        assert self.allows(now)
        if self.opened:  # a trial can take very long: after the pause another one may start
            self.trying, self.until = True, now + LONGEST_PAUSE

    def succeeded(self) -> None:
        self.failures = self.opened = 0
        self.trying = False

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.opened and not self.trying:
            return  # the request started before the breaker opened: this failure is already counted
        if self.trying or self.failures >= self.limit:
            self.until = now + min(LONGEST_PAUSE, self.pause * 2**self.opened)
            self.opened += 1
        self.trying = False

    def neither(self) -> None:
        """Record that a request ended without showing whether the server works: its client disconnected."""
        if self.trying:
            self.trying, self.until = False, 0.0

    @property
    def state(self) -> str:
        return "closed" if not self.opened else "trying" if self.trying else "open"
