"""ResidencySampler: measures how long blocks keep their content, and how long they are idle."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.core.events import BlockSample

MAX_SAMPLES = 256  # samples kept between two reports, so that many evictions at once stay cheap to record


class ResidencySampler:
    def __init__(self, blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._filled_at = [0.0] * blocks  # time of the last allocation, by block
        self._idle_at = [0.0] * blocks  # time at which the block became idle
        self._samples: list[BlockSample] = []

    def take_samples(self) -> list[BlockSample]:
        """Return the samples recorded since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def record_allocation(self, block: int) -> None:
        self._filled_at[block] = self._clock.now()

    def record_idle(self, block: int) -> None:
        self._idle_at[block] = self._clock.now()

    def record_reuse(self, block: int) -> None:
        self._add_duration_sample("reuse_gap", self._idle_at[block])

    def record_eviction(self, block: int) -> None:
        self._add_duration_sample("idle_before_evict", self._idle_at[block])
        self._add_duration_sample("lifetime", self._filled_at[block])

    def record_free(self, block: int) -> None:
        self._add_duration_sample("lifetime", self._filled_at[block])

    def _add_duration_sample(self, kind: str, started_at: float) -> None:
        if len(self._samples) < MAX_SAMPLES:
            self._samples.append((kind, self._clock.now() - started_at))
