"""RouteGraph: the JSON of a dynamic route, and its validation before it is deployed.

Elements name the next element by id. A call passes from `start` to the model that answers, or to `end`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.limits.rule import DIMENSIONS
from emberline.gateway.routes.pattern_reader import read_pattern

MOST_ELEMENTS = 100
MOST_SHARES = 5  # outputs of a percentage, besides "else"
DEEPEST = 8  # nested conditions
COMPARISONS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$exists", "$contains", "$regex")
SOURCES = ("body", "headers", "metadata", "model", "provider", "key", "user")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?)%")


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class To(Struct, frozen=True):
    element_id: str


class Next(Struct, frozen=True):
    next: To


class Branches(Struct, frozen=True):
    true: To
    false: To


class Outcome(Struct, frozen=True):
    success: To
    fallback: To | None = None  # None: the route ends here


class Condition(Struct, frozen=True):
    condition: dict[str, Any]  # {"metadata.plan": {"$eq": "free"}}, $and, $or, $not


class Quota(Struct, frozen=True):
    limit_type: Literal["count", "cost"]
    limit: Annotated[float, msgspec.Meta(ge=0)]  # requests, or dollars
    interval: Annotated[int, msgspec.Meta(ge=1, le=31_622_400)]  # seconds
    key: str = ""  # e.g. metadata.user_id: a quota for each value; "": one for all
    technique: Literal["fixed", "sliding"] = "fixed"


class Target(Struct, frozen=True):
    provider: Annotated[str, msgspec.Meta(min_length=1)]
    model: Annotated[str, msgspec.Meta(min_length=1)]
    timeout: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)] | None = None  # ms
    retries: Annotated[int, msgspec.Meta(ge=0, le=5)] = 0


class Start(Struct, tag="start", tag_field="type", frozen=True):
    id: str
    outputs: Next


class Conditional(Struct, tag="conditional", tag_field="type", frozen=True):
    id: str
    properties: Condition
    outputs: Branches


class Percentage(Struct, tag="percentage", tag_field="type", frozen=True):
    id: str
    outputs: dict[str, To]  # "10%", ..., "else"

    def shares(self) -> list[tuple[float, str]]:
        """Return percent and element id of each output except "else"."""
        return [(float(name[:-1]), to.element_id) for name, to in self.outputs.items() if name != "else"]


class RateLimit(Struct, tag="rate_limit", tag_field="type", frozen=True):
    id: str
    properties: Quota
    outputs: Outcome


class ModelElement(Struct, tag="model", tag_field="type", frozen=True):
    id: str
    properties: Target
    outputs: Outcome


class End(Struct, tag="end", tag_field="type", frozen=True, omit_defaults=True):
    id: str
    outputs: dict[str, To] = {}  # always empty; Cloudflare's clients send it


Element: TypeAlias = Start | Conditional | Percentage | RateLimit | ModelElement | End


class Graph(Struct, frozen=True):
    elements: tuple[Element, ...]

    @staticmethod
    def read(found: object) -> Graph:
        """Parse and validate decoded JSON. Raises InvalidRequest."""
        try:
            graph = msgspec.convert(found, Graph)
        except msgspec.ValidationError as e:
            raise InvalidRequest(f"route: {e}", param="elements") from e
        graph.check()
        return graph

    @property
    def start(self) -> Start:
        return next(each for each in self.elements if isinstance(each, Start))

    def by_id(self) -> dict[str, Element]:
        return {element.id: element for element in self.elements}

    def check(self) -> None:
        known = self.by_id()
        if not 0 < len(self.elements) <= MOST_ELEMENTS:
            raise _wrong(f"the route has {len(self.elements)} elements; 1 to {MOST_ELEMENTS} are allowed")
        if len(known) < len(self.elements):
            raise _wrong("two elements have the same id")
        if sum(isinstance(each, Start) for each in self.elements) != 1:
            raise _wrong("the route must have exactly one start element")
        for element in self.elements:
            for to in _next_of(element):
                if to not in known:
                    raise _wrong(f"element {element.id!r} points to element {to!r}, which does not exist")
            match element:
                case Percentage():
                    _check_shares(element)
                case Conditional():
                    _check_condition(element.properties.condition, element.id)
                case RateLimit():
                    _check_quota(element.properties, element.id)
                case End() if element.outputs:
                    raise _wrong(f"element {element.id!r} is an end element and cannot have outputs")
        reached = self._walk(known)
        if unreachable := [each.id for each in self.elements if each.id not in reached]:
            raise _wrong(f"element {unreachable[0]!r} cannot be reached from the start element")
        if not any(isinstance(each, ModelElement) for each in self.elements):
            raise _wrong("the route must have a model element")

    def _walk(self, known: Mapping[str, Element]) -> set[str]:
        """Return the ids that can be reached from the start. Raises InvalidRequest if there is a cycle."""
        reached: set[str] = set()

        def visit(id: str, trail: tuple[str, ...]) -> None:
            if id in trail:
                raise _wrong(f"the route has a cycle: {' -> '.join([*trail[trail.index(id) :], id])}")
            if id not in reached:
                for to in _next_of(known[id]):
                    visit(to, (*trail, id))
                reached.add(id)

        visit(self.start.id, ())
        return reached


def _next_of(element: Element) -> Iterator[str]:
    match element:
        case Start():
            yield element.outputs.next.element_id
        case Conditional():
            yield element.outputs.true.element_id
            yield element.outputs.false.element_id
        case Percentage():
            yield from (to.element_id for to in element.outputs.values())
        case RateLimit() | ModelElement():
            yield element.outputs.success.element_id
            if element.outputs.fallback is not None:
                yield element.outputs.fallback.element_id


def _check_shares(element: Percentage) -> None:
    for name in element.outputs:
        if name != "else" and not _SHARE.fullmatch(name):
            raise _wrong(f'element {element.id!r}: output {name[:40]!r} must be a percentage such as "10%", or "else"')
    shares = [share for share, _ in element.shares()]
    if not 0 < len(shares) <= MOST_SHARES:
        raise _wrong(f"element {element.id!r} has {len(shares)} percentages; 1 to {MOST_SHARES} are allowed")
    total = sum(shares)
    if total > 100 or (total < 100 and "else" not in element.outputs):
        raise _wrong(
            f"element {element.id!r}: the percentages add up to {total:g}%", 'make them 100%, or less with an "else"'
        )


def _check_condition(condition: object, id: str, depth: int = 0) -> None:
    if not isinstance(condition, Mapping) or not condition or depth > DEEPEST:
        raise _wrong(f"element {id!r}: a condition must be a non-empty object, nested at most {DEEPEST} deep")
    for name, value in condition.items():
        if name in ("$and", "$or"):
            if not isinstance(value, list) or not value:
                raise _wrong(f"element {id!r}: {name} must be a list of conditions")
            for each in value:
                _check_condition(each, id, depth + 1)
        elif name == "$not":
            _check_condition(value, id, depth + 1)
        elif name.partition(".")[0] not in SOURCES:
            raise _wrong(
                f"element {id!r}: a condition cannot use {name[:80]!r}", f"paths begin with {', '.join(SOURCES)}"
            )
        elif isinstance(value, Mapping):
            _check_comparisons(value, id)


def _check_comparisons(asked: Mapping[str, Any], id: str) -> None:
    for operator, value in asked.items():
        if operator not in COMPARISONS:
            raise _wrong(f"element {id!r}: unknown operator {operator[:40]!r}", f"operators: {', '.join(COMPARISONS)}")
        if operator in ("$in", "$nin") and not isinstance(value, list):
            raise _wrong(f"element {id!r}: {operator} must be a list")
        if operator in ("$gt", "$gte", "$lt", "$lte") and not isinstance(value, str | int | float):
            raise _wrong(f"element {id!r}: {operator} must be a number or a string")
        if operator == "$exists" and not isinstance(value, bool):
            raise _wrong(f"element {id!r}: $exists must be true or false")
        if operator == "$regex":
            _check_pattern(value, id)
    if not asked:
        raise _wrong(f"element {id!r}: a comparison has no operator")


def _check_pattern(value: object, id: str) -> None:
    try:
        if not isinstance(value, str):
            raise ValueError("it is not a string")
        read_pattern(value)
    except ValueError as e:
        raise _wrong(f"element {id!r}: $regex {str(value)[:80]!r} is not supported: {e}") from None


def _check_quota(quota: Quota, id: str) -> None:
    if quota.key and quota.key not in DIMENSIONS and not quota.key.startswith("metadata."):
        raise _wrong(f"element {id!r}: key {quota.key[:80]!r} is not supported", "use metadata.<name>, user or key")
    if quota.limit_type == "count" and not quota.limit.is_integer():
        raise _wrong(f"element {id!r}: limit is {quota.limit:g}; a limit of requests must be an integer")


def _wrong(message: str, hint: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, param="elements", hint=hint)
