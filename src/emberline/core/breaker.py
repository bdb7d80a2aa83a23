"""Breaker: stops asking somebody who fails. Closed, open for a pause that doubles, then one request as a trial."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_PAUSE = 30.0


@dataclass(slots=True)
class Breaker:
    limit: int = 3  # failures in a row that open it
    pause: float = 1.0  # seconds, the first time
    failures: int = 0
    opened: int = 0  # times in a row, without a success between
    until: float = 0.0  # when the trial, or another beside one that takes long, may start
    trying: bool = False  # the trial is under way

    def allows(self, now: float) -> bool:
        return not self.opened or now >= self.until

    def began(self, now: float) -> None:
        assert self.allows(now)
        if self.opened:  # a trial may take as long as its caller wishes: others do not wait for all of it
            self.trying, self.until = True, now + LONGEST_PAUSE

    def succeeded(self) -> None:
        self.failures = self.opened = 0
        self.trying = False

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.opened and not self.trying:
            return  # begun before it opened: known already
        if self.trying or self.failures >= self.limit:
            self.until = now + min(LONGEST_PAUSE, self.pause * 2**self.opened)
            self.opened += 1
        self.trying = False

    def neither(self) -> None:
        """The client left before it could be told."""
        if self.trying:
            self.trying, self.until = False, 0.0

    @property
    def state(self) -> str:
        return "closed" if not self.opened else "trying" if self.trying else "open"
