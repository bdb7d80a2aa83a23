"""RampedBurstRate: an arrival rate with bursts at random times, each of random height and length, with ramps."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Burst:
    start_s: float
    seconds: float  # length, both ramps included
    factor: float  # rate at its height over the rate without bursts


@dataclass(frozen=True, slots=True)
class RampedBurstRate:
    rate: float  # requests per second between the bursts
    seconds: float  # length of the whole trace
    bursts: int = 8
    factors: tuple[float, float] = (1.5, 3.0)
    lengths_s: tuple[float, float] = (600.0, 1800.0)
    ramp_s: float = 120.0
    seed: int = 1
    _bursts: tuple[Burst, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        slot_s = self.seconds / max(self.bursts, 1)
        if not self.rate > 0 or self.lengths_s[0] < 2 * self.ramp_s or self.lengths_s[1] > slot_s:
            message = f"{self.bursts} bursts of up to {self.lengths_s[1]:g} s must fit into {self.seconds:g} s"
            raise InvalidRequest(message, param="bursts", hint="use fewer or shorter bursts, with shorter ramps")
        rng = random.Random(self.seed)
        found = []
        for i in range(self.bursts):
            length = rng.uniform(*self.lengths_s)
            start = i * slot_s + rng.uniform(0.0, slot_s - length)
            found.append(Burst(start, length, rng.uniform(*self.factors)))
        object.__setattr__(self, "_bursts", tuple(found))

    @property
    def peak(self) -> float:
        return self.rate * self.factors[1]

    def at(self, time: float) -> float:
        i = bisect_right([burst.start_s for burst in self._bursts], time) - 1
        if i < 0:
            return self.rate
        burst = self._bursts[i]
        into = min(time - burst.start_s, burst.start_s + burst.seconds - time)
        height = min(max(into / self.ramp_s, 0.0), 1.0)
        return self.rate * (1 + (burst.factor - 1) * height)
