"""RouteGraph: the JSON of a dynamic route, and its validation before it is deployed.

Each element names the next element by id. A request passes from `start` to the model that answers, or to `end`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.limits.rule import DIMENSIONS
from emberline.gateway.routes.pattern import compile_pattern

MAX_ELEMENTS = 100
MAX_SHARES = 5  # outputs of a percentage, besides "else"
MAX_CONDITION_DEPTH = 8  # nested conditions
COMPARISONS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$exists", "$contains", "$regex")
FACT_SOURCES = ("body", "headers", "metadata", "model", "provider", "key", "user")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?)%")


class GraphStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class ElementRef(GraphStruct, frozen=True):
    element_id: str


class NextOutput(GraphStruct, frozen=True):
    next: ElementRef


class BranchOutputs(GraphStruct, frozen=True):
    true: ElementRef
    false: ElementRef


class OutcomeOutputs(GraphStruct, frozen=True):
    success: ElementRef
    fallback: ElementRef | None = None  # None: the route ends here


class ConditionProperties(GraphStruct, frozen=True):
    condition: dict[str, Any]  # {"metadata.plan": {"$eq": "free"}}, $and, $or, $not


class QuotaProperties(GraphStruct, frozen=True):
    limit_type: Literal["count", "cost"]
    limit: Annotated[float, msgspec.Meta(ge=0)]  # requests, or dollars
    interval: Annotated[int, msgspec.Meta(ge=1, le=31_622_400)]  # seconds
    key: str = ""  # e.g. metadata.user_id: a quota for each value; "": one for all
    technique: Literal["fixed", "sliding"] = "fixed"


class ModelProperties(GraphStruct, frozen=True):
    provider: Annotated[str, msgspec.Meta(min_length=1)]
    model: Annotated[str, msgspec.Meta(min_length=1)]
    timeout: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)] | None = None  # ms
    retries: Annotated[int, msgspec.Meta(ge=0, le=5)] = 0


class StartElement(GraphStruct, tag="start", tag_field="type", frozen=True):
    id: str
    outputs: NextOutput


class ConditionalElement(GraphStruct, tag="conditional", tag_field="type", frozen=True):
    id: str
    properties: ConditionProperties
    outputs: BranchOutputs


class PercentageElement(GraphStruct, tag="percentage", tag_field="type", frozen=True):
    id: str
    outputs: dict[str, ElementRef]  # "10%", ..., "else"

    def shares(self) -> list[tuple[float, str]]:
        """Return the percentage and the next element's id of each output except "else"."""
        return [(float(name[:-1]), to.element_id) for name, to in self.outputs.items() if name != "else"]


class RateLimitElement(GraphStruct, tag="rate_limit", tag_field="type", frozen=True):
    id: str
    properties: QuotaProperties
    outputs: OutcomeOutputs


class ModelElement(GraphStruct, tag="model", tag_field="type", frozen=True):
    id: str
    properties: ModelProperties
    outputs: OutcomeOutputs


class EndElement(GraphStruct, tag="end", tag_field="type", frozen=True, omit_defaults=True):
    id: str
    outputs: dict[str, ElementRef] = {}  # always empty; Cloudflare's clients send it


Element: TypeAlias = (
    StartElement | ConditionalElement | PercentageElement | RateLimitElement | ModelElement | EndElement
)


class RouteGraph(GraphStruct, frozen=True):
    elements: tuple[Element, ...]

    @staticmethod
    def parse(decoded: object) -> RouteGraph:
        """Parse and validate decoded JSON. Raise InvalidRequest if the route is invalid."""
        try:
            graph = msgspec.convert(decoded, RouteGraph)
        except msgspec.ValidationError as e:
            raise _invalid_route(f"the route's JSON is invalid: {e}") from e
        graph.validate()
        return graph

    @property
    def start_element(self) -> StartElement:
        return next(each for each in self.elements if isinstance(each, StartElement))

    def elements_by_id(self) -> dict[str, Element]:
        return {element.id: element for element in self.elements}

    def validate(self) -> None:
        known = self.elements_by_id()
        if not 0 < len(self.elements) <= MAX_ELEMENTS:
            raise _invalid_route(f"elements must have 1 to {MAX_ELEMENTS} entries, not {len(self.elements)}")
        if len(known) < len(self.elements):
            ids = [each.id for each in self.elements]
            raise _invalid_route(f"id {next(id for id in ids if ids.count(id) > 1)!r} is used by two elements")
        if sum(isinstance(each, StartElement) for each in self.elements) != 1:
            raise _invalid_route("elements must contain exactly one start element")
        for element in self.elements:
            for to in _next_element_ids(element):
                if to not in known:
                    raise _invalid_route(f"element {element.id!r} points to element {to!r}, which does not exist")
            match element:
                case PercentageElement():
                    _check_percentages(element)
                case ConditionalElement():
                    _check_condition(element.properties.condition, element.id)
                case RateLimitElement():
                    _check_quota(element.properties, element.id)
                case EndElement() if element.outputs:
                    raise _invalid_route(f"end element {element.id!r} must not have outputs")
        reached = self._reachable_ids(known)
        if unreachable := [each.id for each in self.elements if each.id not in reached]:
            raise _invalid_route(f"element {unreachable[0]!r} cannot be reached from the start element")
        if not any(isinstance(each, ModelElement) for each in self.elements):
            raise _invalid_route("elements must contain a model element")

    def _reachable_ids(self, elements: Mapping[str, Element]) -> set[str]:
        """Return the ids of all elements that can be reached from the start.

        Raise InvalidRequest if there is a cycle.
        """
        reached: set[str] = set()

        def visit(element_id: str, path: tuple[str, ...]) -> None:
            if element_id in path:
                cycle = [*path[path.index(element_id) :], element_id]
                raise _invalid_route(f"the route has a cycle: {' -> '.join(cycle)}")
            if element_id not in reached:
                for next_id in _next_element_ids(elements[element_id]):
                    visit(next_id, (*path, element_id))
                reached.add(element_id)

        visit(self.start_element.id, ())
        return reached


def _next_element_ids(element: Element) -> Iterator[str]:
    match element:
        case StartElement():
            yield element.outputs.next.element_id
        case ConditionalElement():
            yield element.outputs.true.element_id
            yield element.outputs.false.element_id
        case PercentageElement():
            yield from (to.element_id for to in element.outputs.values())
        case RateLimitElement() | ModelElement():
            yield element.outputs.success.element_id
            if element.outputs.fallback is not None:
                yield element.outputs.fallback.element_id


def _check_percentages(element: PercentageElement) -> None:
    for name in element.outputs:
        if name != "else" and not _SHARE.fullmatch(name):
            raise _invalid_route(
                f'output {name[:40]!r} of element {element.id!r} must be a percentage such as "10%", or "else"'
            )
    shares = [share for share, _ in element.shares()]
    if not 0 < len(shares) <= MAX_SHARES:
        raise _invalid_route(f"element {element.id!r} must have 1 to {MAX_SHARES} percentages, not {len(shares)}")
    total = sum(shares)
    if total > 100 or (total < 100 and "else" not in element.outputs):
        raise _invalid_route(
            f"the percentages of element {element.id!r} must add up to 100%, not {total:g}%",
            'add an output "else" for the remaining requests, or change the percentages',
        )


def _check_condition(condition: object, element_id: str, depth: int = 0) -> None:
    if not isinstance(condition, Mapping) or not condition or depth > MAX_CONDITION_DEPTH:
        raise _invalid_route(
            f"the condition of element {element_id!r} must be an object, at most {MAX_CONDITION_DEPTH} levels deep"
        )
    for name, value in condition.items():
        if name in ("$and", "$or"):
            if not isinstance(value, list) or not value:
                raise _invalid_route(f"{name} of element {element_id!r} must be a list of conditions")
            for each in value:
                _check_condition(each, element_id, depth + 1)
        elif name == "$not":
            _check_condition(value, element_id, depth + 1)
        elif name.partition(".")[0] not in FACT_SOURCES:
            raise _invalid_route(
                f"the condition of element {element_id!r} has an unknown field {name[:80]!r}",
                f"fields begin with one of {', '.join(FACT_SOURCES)}",
            )
        elif isinstance(value, Mapping):
            _check_comparisons(value, element_id)


def _check_comparisons(comparisons: Mapping[str, Any], element_id: str) -> None:
    for operator, value in comparisons.items():
        if operator not in COMPARISONS:
            raise _invalid_route(
                f"the condition of element {element_id!r} has an unknown operator {operator[:40]!r}",
                f"known operators: {', '.join(COMPARISONS)}",
            )
        if operator in ("$in", "$nin") and not isinstance(value, list):
            raise _invalid_route(f"{operator} of element {element_id!r} must be a list")
        if operator in ("$gt", "$gte", "$lt", "$lte") and not isinstance(value, str | int | float):
            raise _invalid_route(f"{operator} of element {element_id!r} must be a number or a string")
        if operator == "$exists" and not isinstance(value, bool):
            raise _invalid_route(f"$exists of element {element_id!r} must be true or false")
        if operator == "$regex":
            _check_pattern(value, element_id)
    if not comparisons:
        raise _invalid_route(f"a comparison of element {element_id!r} must have an operator")


def _check_pattern(value: object, element_id: str) -> None:
    try:
        if not isinstance(value, str):
            raise ValueError("the pattern must be a string")
        compile_pattern(value)
    except ValueError as e:
        raise _invalid_route(
            f"$regex {str(value)[:80]!r} of element {element_id!r} is not supported: {e}",
            "the syntax is RE2's, without backreferences and lookaround: https://github.com/google/re2/wiki/Syntax",
        ) from None


def _check_quota(quota: QuotaProperties, element_id: str) -> None:
    if quota.key and quota.key not in DIMENSIONS and not quota.key.startswith("metadata."):
        raise _invalid_route(
            f"key of element {element_id!r} must be metadata.NAME, user or key, not {quota.key[:80]!r}"
        )
    if quota.limit_type == "count" and not quota.limit.is_integer():
        raise _invalid_route(
            f"limit of element {element_id!r} must be an integer because the unit is requests, not {quota.limit:g}"
        )


def _invalid_route(message: str, hint: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, param="elements", hint=hint or "docs/gateway-routing.md describes routes")
