"""Residency: how long blocks keep their content, lie idle before they are evicted, and wait to be used again."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.core.events import BlockSample

MOST = 256  # samples kept between two reports; in a storm of evictions these speak for the rest


class Residency:
    def __init__(self, blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._filled = [0.0] * blocks  # since when
        self._idle = [0.0] * blocks
        self._samples: list[BlockSample] = []

    def drain(self) -> list[BlockSample]:
        """What was seen since the last time."""
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
