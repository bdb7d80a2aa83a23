"""RouteTraversal: one call's way through a route.

It stops at each element that needs an action (a rate limit or a model), and continues with the action's result. It is
pure: random choices are a hash of a seed, the same for equal seeds."""

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
    """A validated graph with its conditions compiled."""

    name: str
    start: Element
    elements: Mapping[str, Element]
    tests: Mapping[str, Test]  # of conditional elements, by id

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
    seed: str  # of the random choices at percentages
    at: Element | None
    answers: Mapping[str, bool] = field(default_factory=dict)  # of conditions evaluated before, by id

    @staticmethod
    def begin(plan: Plan, facts: Facts, seed: str, answers: Mapping[str, bool] | None = None) -> Walk:
        return Walk(plan, facts, seed, plan.start, answers or {})

    def next(self) -> Asking | None:
        """Return the next rate limit or model element, or None at the end of the route."""
        while True:
            match self.at:
                case None | End():
                    return None
                case RateLimit() | ModelElement() as action:
                    return action
                case Start() as start:
                    self._go(start.outputs.next)
                case Conditional() as conditional:
                    holds = self.answers.get(conditional.id)
                    if holds is None:
                        holds = self.plan.tests[conditional.id](self.facts)
                    self._go(conditional.outputs.true if holds else conditional.outputs.false)
                case Percentage() as percentage:
                    self.at = self.plan.elements[self._drawn(percentage)]

    def went(self, well: bool) -> None:
        """Move on from the current action element, to its success or its fallback output."""
        outputs = self._outputs()
        self._go(outputs.success if well else outputs.fallback)

    @property
    def rescued(self) -> bool:
        """Whether the route continues if the current action fails."""
        return self._outputs().fallback is not None

    def likely(self) -> ModelElement | None:
        """Return the model that answers if every action from here succeeds."""
        ahead = replace(self)
        while (action := ahead.next()) is not None:
            if isinstance(action, ModelElement):
                return action
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
    """Return a number in [0, 1) that depends on the seed only."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]) / (1 << 56)
