"""FakeSleeper: the state of a fake model that sleeps and wakes, for tests of swapping and of engine groups."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.clock import ManualClock


@dataclass
class FakeSleeper:
    """A model's name, size and state, without a model. `fails` is raised by the next change of state."""

    name: str
    nbytes: int
    clock: ManualClock
    log: list[str]  # every change of state, as "wake NAME" or "sleep NAME"
    awake: bool = False
    fails: Exception | None = None

    def change_state(self, what: str, awake: bool, seconds: float = 0.0) -> None:
        """Change the state, which takes `seconds` on the clock."""
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.clock.advance(seconds)
        self.awake = awake
        self.log.append(f"{what} {self.name}")
