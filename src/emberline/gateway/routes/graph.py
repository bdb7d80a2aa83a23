"""Graph: a dynamic route. Elements point at the next one by id; a call walks from `start` until it meets a model that
answers, or `end`. What is here is its shape and what must hold of it before it may be deployed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.limits.rule import DIMENSIONS
from emberline.gateway.routes.pattern_reader import read_pattern

MOST_ELEMENTS = 100
MOST_SHARES = 5  # of a percentage, besides "else"
DEEPEST = 8  # conditions within conditions
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
    fallback: To | None = None  # None: the route ends there


class Condition(Struct, frozen=True):
    condition: dict[str, Any]  # {"metadata.plan": {"$eq": "free"}}, $and, $or, $not


class Quota(Struct, frozen=True):
    limit_type: Literal["count", "cost"]
    limit: Annotated[float, msgspec.Meta(ge=0)]  # requests, or dollars
    interval: Annotated[int, msgspec.Meta(ge=1, le=31_622_400)]  # seconds
    key: str = ""  # such as metadata.user_id: each value has its own; empty: all share one
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
        """Percent and where to, without "else"."""
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
        """From decoded JSON; checked."""
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
            raise _wrong(f"a route has 1 to {MOST_ELEMENTS} elements")
        if len(known) < len(self.elements):
            raise _wrong("two elements have the same id")
        if sum(isinstance(each, Start) for each in self.elements) != 1:
            raise _wrong("a route has exactly one start")
        for element in self.elements:
            for to in _next_of(element):
                if to not in known:
                    raise _wrong(f"element {element.id!r} goes to {to!r}, which is not there")
            match element:
                case Percentage():
                    _check_shares(element)
                case Conditional():
                    _check_condition(element.properties.condition, element.id)
                case RateLimit():
                    _check_quota(element.properties, element.id)
                case End() if element.outputs:
                    raise _wrong(f"element {element.id!r} is an end and cannot have outputs")
        reached = self._walk(known)
        if lost := [each.id for each in self.elements if each.id not in reached]:
            raise _wrong(f"element {lost[0]!r} cannot be reached from the start")
        if not any(isinstance(each, ModelElement) for each in self.elements):
            raise _wrong("a route needs a model")

    def _walk(self, known: Mapping[str, Element]) -> set[str]:
        """All that can be reached; a way that comes back to itself is refused."""
        done: set[str] = set()

        def visit(id: str, trail: tuple[str, ...]) -> None:
            if id in trail:
                raise _wrong(f"the route goes in a circle: {' -> '.join([*trail[trail.index(id) :], id])}")
            if id not in done:
                for to in _next_of(known[id]):
                    visit(to, (*trail, id))
                done.add(id)

        visit(self.start.id, ())
        return done


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
            raise _wrong(f'element {element.id!r}: an output is named "10%" or "else", not {name[:40]!r}')
    shares = [share for share, _ in element.shares()]
    if not 0 < len(shares) <= MOST_SHARES:
        raise _wrong(f"element {element.id!r} needs 1 to {MOST_SHARES} shares")
    whole = sum(shares)
    if whole > 100 or (whole < 100 and "else" not in element.outputs):
        raise _wrong(
            f"element {element.id!r}: shares are {whole:g}% together", 'at most 100, and less only with "else"'
        )


def _check_condition(condition: object, id: str, depth: int = 0) -> None:
    if not isinstance(condition, Mapping) or not condition or depth > DEEPEST:
        raise _wrong(f"element {id!r}: a condition is an object with something in it, at most {DEEPEST} deep")
    for name, value in condition.items():
        if name in ("$and", "$or"):
            if not isinstance(value, list) or not value:
                raise _wrong(f"element {id!r}: {name} needs a list of conditions")
            for each in value:
                _check_condition(each, id, depth + 1)
        elif name == "$not":
            _check_condition(value, id, depth + 1)
        elif name.partition(".")[0] not in SOURCES:
            raise _wrong(
                f"element {id!r}: {name[:80]!r} is nothing to ask about", f"it begins with {', '.join(SOURCES)}"
            )
        elif isinstance(value, Mapping):
            _check_comparisons(value, id)


def _check_comparisons(asked: Mapping[str, Any], id: str) -> None:
    for operator, value in asked.items():
        if operator not in COMPARISONS:
            raise _wrong(f"element {id!r}: there is no {operator[:40]!r}", f"known are {', '.join(COMPARISONS)}")
        if operator in ("$in", "$nin") and not isinstance(value, list):
            raise _wrong(f"element {id!r}: {operator} needs a list")
        if operator in ("$gt", "$gte", "$lt", "$lte") and not isinstance(value, str | int | float):
            raise _wrong(f"element {id!r}: {operator} needs a number or a string")
        if operator == "$exists" and not isinstance(value, bool):
            raise _wrong(f"element {id!r}: $exists needs true or false")
        if operator == "$regex":
            _check_pattern(value, id)
    if not asked:
        raise _wrong(f"element {id!r}: a comparison is empty")


def _check_pattern(value: object, id: str) -> None:
    try:
        if not isinstance(value, str):
            raise ValueError("it is no string")
        read_pattern(value)
    except ValueError as e:
        raise _wrong(f"element {id!r}: the $regex {str(value)[:80]!r} cannot be used: {e}") from None


def _check_quota(quota: Quota, id: str) -> None:
    if quota.key and quota.key not in DIMENSIONS and not quota.key.startswith("metadata."):
        raise _wrong(f"element {id!r}: {quota.key[:80]!r} is nothing to count by", "metadata.<name>, user or key")
    if quota.limit_type == "count" and not quota.limit.is_integer():
        raise _wrong(f"element {id!r}: half a request cannot be counted")


def _wrong(message: str, hint: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, param="elements", hint=hint)
