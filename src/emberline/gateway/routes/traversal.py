"""RouteTraversal: the path of one request through a dynamic route.

The traversal stops at each element that needs an action (a rate limit or a model), and continues with the action's
result. It has no side effects. Random choices depend only on a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.gateway.routes.condition import AttributeSource, Predicate, compile_condition
from emberline.gateway.routes.graph import (
    ConditionalElement,
    Element,
    ElementRef,
    EndElement,
    ModelElement,
    OutcomeOutputs,
    PercentageElement,
    RateLimitElement,
    RouteGraph,
    StartElement,
)

ActionElement = RateLimitElement | ModelElement


@dataclass(frozen=True, slots=True)
class CompiledRoute:
    """A validated graph with its conditions compiled."""

    name: str
    start: Element
    elements: Mapping[str, Element]
    predicates: Mapping[str, Predicate]  # of conditional elements, by id

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        elements = self.elements.values()
        return {each.id: each.properties.condition for each in elements if isinstance(each, ConditionalElement)}

    @staticmethod
    def compile(name: str, graph: RouteGraph) -> CompiledRoute:
        conditionals = [each for each in graph.elements if isinstance(each, ConditionalElement)]
        predicates = {each.id: compile_condition(each.properties.condition) for each in conditionals}
        return CompiledRoute(name, graph.start_element, graph.elements_by_id(), predicates)


@dataclass(slots=True)
class RouteTraversal:
    route: CompiledRoute
    facts: AttributeSource
    seed: str  # of the random choices at percentages
    current: Element | None
    condition_results: Mapping[str, bool] = field(default_factory=dict)  # of conditions evaluated before, by id

    @staticmethod
    def start(
        route: CompiledRoute, facts: AttributeSource, seed: str, condition_results: Mapping[str, bool] | None = None
    ) -> RouteTraversal:
        return RouteTraversal(route, facts, seed, route.start, condition_results or {})

    def next_action(self) -> ActionElement | None:
        """Return the next rate limit or model element, or None at the end of the route."""
        while True:
            match self.current:
                case None | EndElement():
                    return None
                case RateLimitElement() | ModelElement() as action:
                    return action
                case StartElement() as start:
                    self._move_to_element(start.outputs.next)
                case ConditionalElement() as conditional:
                    holds = self.condition_results.get(conditional.id)
                    if holds is None:
                        holds = self.route.predicates[conditional.id](self.facts)
                    self._move_to_element(conditional.outputs.true if holds else conditional.outputs.false)
                case PercentageElement() as percentage:
                    self.current = self.route.elements[self._draw_output(percentage)]

    def advance(self, succeeded: bool) -> None:
        """Move from the current rate limit or model to its success output or its fallback output."""
        outputs = self._current_outputs()
        self._move_to_element(outputs.success if succeeded else outputs.fallback)

    @property
    def has_fallback(self) -> bool:
        """Return whether the route continues if the current action fails."""
        return self._current_outputs().fallback is not None

    def expected_model(self) -> ModelElement | None:
        """Return the model that answers if every action from here on succeeds."""
        ahead = replace(self)
        while (action := ahead.next_action()) is not None:
            if isinstance(action, ModelElement):
                return action
            ahead.advance(True)
        return None

    def _current_outputs(self) -> OutcomeOutputs:
        assert isinstance(self.current, RateLimitElement | ModelElement)
        return self.current.outputs

    def _move_to_element(self, element_ref: ElementRef | None) -> None:
        self.current = None if element_ref is None else self.route.elements[element_ref.element_id]

    def _draw_output(self, element: PercentageElement) -> str:
        left = random_fraction_from_seed(f"{self.route.name}\n{element.id}\n{self.seed}") * 100
        for share, to in element.shares():
            if left < share:
                return to
            left -= share
        rest = element.outputs.get("else")
        return rest.element_id if rest is not None else element.shares()[-1][1]


def random_fraction_from_seed(seed: str) -> float:
    """Return a number in [0, 1) that depends on the seed only."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]) / (1 << 56)
