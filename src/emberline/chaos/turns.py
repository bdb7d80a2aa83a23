"""FaultScheduler: which fault comes next, given the unavailable processes and active faults.

At least one worker that can answer is always left."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from emberline.chaos.faults import Fault
from emberline.chaos.place import Place
from emberline.chaos.sight import Stage


@dataclass(frozen=True, slots=True)
class Turn:
    fault: Fault
    stage: Stage
    home: Place  # the worker that should answer
    claims: tuple[str, ...]  # processes and counter that no other fault may use meanwhile


class Turns:
    def __init__(self, workers: Sequence[Place], dice: random.Random) -> None:
        self._workers = workers
        self._dice = dice
        self.ahead: list[tuple[Fault, Stage]] = []
        self.struck: dict[str, Fault] = {}  # claimed process or counter, and the fault that claims it

    def next(self, absent: Collection[str]) -> Turn | None:
        """Return the first pending fault that may begin now; it is active until `finish`."""
        for i, (fault, stage) in enumerate(self.ahead):
            if (scheduled := self._turn(fault, stage, absent)) is not None:
                del self.ahead[i]
                self.struck |= dict.fromkeys(scheduled.claims, fault)
                return scheduled
        return None

    def over(self, turn: Turn) -> None:
        for claim in turn.claims:
            del self.struck[claim]

    def _turn(self, fault: Fault, stage: Stage, absent: Collection[str]) -> Turn | None:
        unavailable_names = {*absent, *(name for name, other in self.struck.items() if not other.gentle)}
        answering_workers = [worker for worker in self._of("decode") if worker.name not in unavailable_names]
        if "router" in unavailable_names or (fault.of == "router" and not fault.gentle and {*absent, *self.struck}):
            return None
        if stage is Stage.TRANSFER and any(worker.name in unavailable_names for worker in self._of("prefill")):
            return None
        candidates = [worker for worker in answering_workers if not (fault.wired and worker.mapped)]
        self._dice.shuffle(candidates)
        for candidate in candidates:
            claims = self._claims(fault, candidate)
            remaining = (
                {worker.name for worker in self._workers}
                - unavailable_names
                - ({*claims} if not fault.gentle else set())
            )
            if remaining and not {*absent, *self.struck} & {*claims}:
                return Turn(fault, stage, candidate, claims)
        return None

    def _claims(self, fault: Fault, home: Place) -> tuple[str, ...]:
        match fault.of:
            case "decode":
                processes = [home.name]
            case "prefill":
                processes = [worker.name for worker in self._of("prefill")]
            case other:
                processes = [other]
        return (*processes, fault.shows) if fault.shows else tuple(processes)

    def _of(self, role: str) -> list[Place]:
        return [worker for worker in self._workers if worker.role == role]


def drawn(faults: Sequence[Fault], dice: random.Random) -> Iterator[tuple[Fault, Stage]]:
    """Yield faults without end: each kind once, then by weight, with stages in rotation."""
    order = list(faults)
    dice.shuffle(order)
    stage_index = {fault.name: dice.randrange(len(fault.stages)) for fault in faults}
    while True:
        fault = order.pop() if order else dice.choices(faults, [fault.weight for fault in faults])[0]
        stage_index[fault.name] += 1
        yield fault, fault.stages[stage_index[fault.name] % len(fault.stages)]
