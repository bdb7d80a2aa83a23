"""A pool of workers as a fluid queue, which is enough to test the autoscaler's policy in milliseconds.

Work arrives as a rate and is computed at `capacity` per ready worker. First tokens wait for the work before them, and
tokens take longer the busier the workers are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from emberline.autoscaler.observation import PoolObservation
from emberline.autoscaler.policy import PolicyState, decide_scaling
from emberline.autoscaler.settings import AutoscalerSettings


@dataclass
class QueueModel:
    settings: AutoscalerSettings
    capacity: float = 1000.0  # work per second of a worker at the SLO
    start_s: float = 30.0
    ready: int = 1
    starting: list[float] = field(default_factory=list)  # when they become ready
    backlog: float = 0.0
    now: float = 0.0
    state: PolicyState = field(default_factory=PolicyState)
    history: list[tuple[float, int, bool]] = field(default_factory=list)  # time, workers, SLO met

    def run(self, seconds: float, rate: Callable[[float], float]) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step(rate(self.now))

    def step(self, rate: float) -> None:
        interval = self.settings.interval
        self.now += interval
        self.ready += sum(at <= self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        room = self.ready * self.capacity * 1.1  # a little more than the SLO allows
        self.backlog = max(self.backlog + (rate - room) * interval, 0.0)
        load = min(rate / room, 1.0) if room else 1.0
        seen = PoolObservation(
            ready=self.ready,
            starting=len(self.starting),
            open_requests=round(20 * load * max(self.ready, 1)) if rate or self.backlog else 0,
            waiting_requests=round(rate) if not self.ready else 0,
            prompt_backlog=self.backlog,
            prompt_rate=rate,
            ttft_s=(0.1 + (self.backlog / room if room else interval)) if rate else None,
            itl_s=0.01 + 0.04 * load**3 if rate else None,
        )
        slo = self.settings.slo
        met = seen.ttft_s is None or (seen.ttft_s <= slo.ttft_p90 and (seen.itl_s or 0.0) <= slo.itl_p90)
        self.history.append((self.now, self.ready + len(self.starting), met))
        decision = decide_scaling({"both": seen}, self.state, self.now, self.settings)
        self.state = decision.state
        desired = decision.desired["both"]
        missing = desired - self.ready - len(self.starting)
        self.starting += [self.now + self.start_s] * max(missing, 0)
        for _ in range(max(-missing, 0)):
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1

    @property
    def workers(self) -> list[int]:
        return [workers for _, workers, _ in self.history]

    @property
    def met_share(self) -> float:
        return sum(met for *_, met in self.history) / len(self.history)

    def count_direction_changes(self) -> int:
        moves = [b - a for a, b in zip(self.workers, self.workers[1:], strict=False) if b != a]
        return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(moves))
