"""Turns: which fault comes next, given who is away and what strikes already. Somebody who can answer is always left."""

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
    home: Place  # who is to answer
    claims: tuple[str, ...]  # what no other fault may touch meanwhile: places, a counter


class Turns:
    def __init__(self, workers: Sequence[Place], dice: random.Random) -> None:
        self._workers = workers
        self._dice = dice
        self.ahead: list[tuple[Fault, Stage]] = []
        self.struck: dict[str, Fault] = {}  # what is claimed, and by whom

    def next(self, absent: Collection[str]) -> Turn | None:
        """The first that may come now; it is under way until it is `over`."""
        for i, (fault, stage) in enumerate(self.ahead):
            if (turn := self._turn(fault, stage, absent)) is not None:
                del self.ahead[i]
                self.struck |= dict.fromkeys(turn.claims, fault)
                return turn
        return None

    def over(self, turn: Turn) -> None:
        for claim in turn.claims:
            del self.struck[claim]

    def _turn(self, fault: Fault, stage: Stage, absent: Collection[str]) -> Turn | None:
        away = {*absent, *(name for name, other in self.struck.items() if not other.gentle)}
        answering = [place for place in self._of("decode") if place.name not in away]
        if "router" in away or (fault.of == "router" and not fault.gentle and {*absent, *self.struck}):
            return None
        if stage is Stage.TRANSFER and any(place.name in away for place in self._of("prefill")):
            return None
        homes = [place for place in answering if not (fault.wired and place.mapped)]
        self._dice.shuffle(homes)
        for home in homes:
            claims = self._claims(fault, home)
            left = {place.name for place in self._workers} - away - ({*claims} if not fault.gentle else set())
            if left and not {*absent, *self.struck} & {*claims}:
                return Turn(fault, stage, home, claims)
        return None

    def _claims(self, fault: Fault, home: Place) -> tuple[str, ...]:
        match fault.of:
            case "decode":
                struck = [home.name]
            case "prefill":
                struck = [place.name for place in self._of("prefill")]
            case other:
                struck = [other]
        return (*struck, fault.shows) if fault.shows else tuple(struck)

    def _of(self, role: str) -> list[Place]:
        return [place for place in self._workers if place.role == role]


def drawn(faults: Sequence[Fault], dice: random.Random) -> Iterator[tuple[Fault, Stage]]:
    """Each kind once, then as often as its weight says; stages in turn. Without end."""
    order = list(faults)
    dice.shuffle(order)
    turns = {fault.name: dice.randrange(len(fault.stages)) for fault in faults}
    while True:
        fault = order.pop() if order else dice.choices(faults, [fault.weight for fault in faults])[0]
        turns[fault.name] += 1
        yield fault, fault.stages[turns[fault.name] % len(fault.stages)]
