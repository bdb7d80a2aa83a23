"""Walk: one call's way through a route. It stops wherever somebody has to be asked, a limit or a model, and goes on
when it is told how that went. Pure: chance is a hash of a seed, so that the same seed goes the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.gateway.routes.condition import Facts, Test, compiled
from emberline.gateway.routes.graph import (
    Conditional,
    Element,
    End,
    Graph,
    ModelElement,
    Outcome,
    Percentage,
    RateLimit,
    Start,
    To,
)

Asking = RateLimit | ModelElement


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked graph, ready to be walked."""

    name: str
    start: Element
    elements: Mapping[str, Element]
    tests: Mapping[str, Test]  # of conditionals

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        found = self.elements.values()
        return {each.id: each.properties.condition for each in found if isinstance(each, Conditional)}

    @staticmethod
    def of(name: str, graph: Graph) -> Plan:
        conditionals = [each for each in graph.elements if isinstance(each, Conditional)]
        tests = {each.id: compiled(each.properties.condition) for each in conditionals}
        return Plan(name, graph.start, graph.by_id(), tests)


@dataclass(slots=True)
class Walk:
    plan: Plan
    facts: Facts
    seed: str  # of percentages
    at: Element | None
    answers: Mapping[str, bool] = field(default_factory=dict)  # of conditionals that were tested before, by id

    @staticmethod
    def begin(plan: Plan, facts: Facts, seed: str, answers: Mapping[str, bool] | None = None) -> Walk:
        return Walk(plan, facts, seed, plan.start, answers or {})

    def next(self) -> Asking | None:
        """Whom to ask; None: the end."""
        while True:
            match self.at:
                case None | End():
                    return None
                case RateLimit() | ModelElement() as asking:
                    return asking
                case Start() as start:
                    self._go(start.outputs.next)
                case Conditional() as question:
                    yes = self.answers.get(question.id)
                    if yes is None:
                        yes = self.plan.tests[question.id](self.facts)
                    self._go(question.outputs.true if yes else question.outputs.false)
                case Percentage() as parted:
                    self.at = self.plan.elements[self._drawn(parted)]

    def went(self, well: bool) -> None:
        """How it went with the one that `next` gave."""
        outputs = self._outputs()
        self._go(outputs.success if well else outputs.fallback)

    @property
    def rescued(self) -> bool:
        """There is a way on if it goes wrong."""
        return self._outputs().fallback is not None

    def likely(self) -> ModelElement | None:
        """The model that answers if all goes well from here."""
        ahead = replace(self)
        while (asking := ahead.next()) is not None:
            if isinstance(asking, ModelElement):
                return asking
            ahead.went(True)
        return None

    def _outputs(self) -> Outcome:
        assert isinstance(self.at, RateLimit | ModelElement)
        return self.at.outputs

    def _go(self, to: To | None) -> None:
        self.at = None if to is None else self.plan.elements[to.element_id]

    def _drawn(self, parted: Percentage) -> str:
        left = drawn(f"{self.plan.name}\n{parted.id}\n{self.seed}") * 100
        for share, to in parted.shares():
            if left < share:
                return to
            left -= share
        rest = parted.outputs.get("else")
        return rest.element_id if rest is not None else parted.shares()[-1][1]


def drawn(seed: str) -> float:
    """From 0 up to 1, the same for the same seed."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]) / (1 << 56)
