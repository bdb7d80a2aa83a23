"""ResidencySampler: measures how long blocks keep their content and how long they stay idle."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.core.events import BlockSample

MOST = 256  # samples kept between two reports, so that many evictions at once stay cheap to record


class Residency:
    def __init__(self, blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._filled = [0.0] * blocks  # time of the last allocation, by block
        self._idle = [0.0] * blocks  # time at which the block became idle
        self._samples: list[BlockSample] = []

    def drain(self) -> list[BlockSample]:
        """Return the samples recorded since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def taken(self, block: int) -> None:
        self._filled[block] = self._clock.now()

    def idled(self, block: int) -> None:
        self._idle[block] = self._clock.now()

    def reused(self, block: int) -> None:
        self._note("reuse_gap", self._idle[block])

    def evicted(self, block: int) -> None:
        self._note("idle_before_evict", self._idle[block])
        self._note("lifetime", self._filled[block])

    def freed(self, block: int) -> None:
        self._note("lifetime", self._filled[block])

    def _note(self, kind: str, since: float) -> None:
        if len(self._samples) < MOST:
            self._samples.append((kind, self._clock.now() - since))
