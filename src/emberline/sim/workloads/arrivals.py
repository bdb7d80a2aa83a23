"""Arrival rates over time: constant (a Poisson process), with bursts, and with the rhythm of a day."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from emberline.core.errors import InvalidRequest

DAY_S = 86_400.0


class ArrivalRate(Protocol):
    @property
    def peak(self) -> float:
        """The highest rate per second at any time."""
        ...

    def at(self, time: float) -> float:
        """Return the rate per second at this time."""
        ...


def draw_arrivals(rate: ArrivalRate, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield random times from 0 to `seconds` at which requests arrive: a Poisson process with this rate."""
    time, peak = 0.0, rate.peak
    while (time := time + rng.expovariate(peak)) < seconds:
        if rng.random() * peak < rate.at(time):
            yield time


@dataclass(frozen=True, slots=True)
class ConstantRate:
    rate: float

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    @property
    def peak(self) -> float:
        return self.rate

    def at(self, time: float) -> float:
        return self.rate


@dataclass(frozen=True, slots=True)
class BurstRate:
    """A constant rate that is `factor` times as high during bursts."""

    rate: float  # requests per second between the bursts
    factor: float = 5.0
    every_s: float = 300.0  # seconds from the start of one burst to that of the next; the first starts after this time
    burst_s: float = 30.0

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)
        _check_positive("every", self.every_s)
        if self.factor < 1:
            raise InvalidRequest(f"factor is {self.factor:g}; it must be at least 1", param="factor")
        if not 0 < self.burst_s <= self.every_s:
            message = f"burst is {self.burst_s:g} s; it must be above 0 and at most every, {self.every_s:g} s"
            raise InvalidRequest(message, param="burst")

    @property
    def peak(self) -> float:
        return self.rate * self.factor

    def at(self, time: float) -> float:
        return self.peak if time >= self.every_s and time % self.every_s < self.burst_s else self.rate


@dataclass(frozen=True, slots=True)
class DiurnalRate:
    """A rate that follows a sine over each day: lowest at the start, highest after half a day."""

    rate: float  # mean over a day
    peak_factor: float = 1.7  # the highest rate over the mean
    day_s: float = DAY_S

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)
        _check_positive("day", self.day_s)
        if not 1 <= self.peak_factor <= 2:
            raise InvalidRequest(f"peak is {self.peak_factor:g}; it must be from 1 to 2", param="peak")

    @property
    def peak(self) -> float:
        return self.rate * self.peak_factor

    def at(self, time: float) -> float:
        return self.rate * (1 - (self.peak_factor - 1) * math.cos(2 * math.pi * time / self.day_s))


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidRequest(f"{name} is {value:g}; it must be above 0", param=name)
