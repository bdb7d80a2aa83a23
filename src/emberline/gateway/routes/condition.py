"""Condition: a question about a call, as Mongo would ask it: {"metadata.plan": {"$in": ["free", "trial"]}}. Made once
into a test of facts. What is not there equals null, is in no list that has none, and is neither more nor less than
anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from emberline.gateway.routes.pattern_reader import read_pattern


class Facts(Protocol):
    def get(self, path: str) -> Any:
        """None: it is not there."""
        ...


Test: TypeAlias = Callable[[Facts], bool]
_Compare: TypeAlias = Callable[[Any], bool]


def compiled(condition: Mapping[str, Any]) -> Test:
    """Of a condition that was checked. All of its fields must hold."""
    tests = [_field(name, value) for name, value in condition.items()]
    return tests[0] if len(tests) == 1 else lambda facts: all(test(facts) for test in tests)


def _field(name: str, value: Any) -> Test:
    match name:
        case "$and":
            inner = [compiled(each) for each in value]
            return lambda facts: all(test(facts) for test in inner)
        case "$or":
            inner = [compiled(each) for each in value]
            return lambda facts: any(test(facts) for test in inner)
        case "$not":
            denied = compiled(value)
            return lambda facts: not denied(facts)
    asked = value if isinstance(value, Mapping) else {"$eq": value}
    compares = [_compare(operator, wanted) for operator, wanted in asked.items()]
    return lambda facts: all(compare(facts.get(name)) for compare in compares)


def _compare(operator: str, wanted: Any) -> _Compare:
    match operator:
        case "$eq":
            return lambda found: _same(found, wanted)
        case "$ne":
            return lambda found: not _same(found, wanted)
        case "$in":
            return lambda found: any(_same(found, each) for each in wanted)
        case "$nin":
            return lambda found: not any(_same(found, each) for each in wanted)
        case "$exists":
            return lambda found: (found is not None) == wanted
        case "$contains":
            return lambda found: _contains(found, wanted)
        case "$regex":
            pattern = read_pattern(wanted)
            return lambda found: isinstance(found, str) and pattern.found_in(found)
        case "$gt":
            return lambda found: _ordered(found, wanted) and found > wanted
        case "$gte":
            return lambda found: _ordered(found, wanted) and found >= wanted
        case "$lt":
            return lambda found: _ordered(found, wanted) and found < wanted
        case "$lte":
            return lambda found: _ordered(found, wanted) and found <= wanted
    raise AssertionError(f"{operator} was not checked")


def _same(found: Any, wanted: Any) -> bool:
    """True is not 1."""
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


def _ordered(found: Any, wanted: Any) -> bool:
    """Two numbers, or two strings."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return False
    if isinstance(wanted, str):
        return isinstance(found, str)
    return isinstance(found, int | float)


def _contains(found: Any, wanted: Any) -> bool:
    if isinstance(found, str):
        return isinstance(wanted, str) and wanted in found
    return isinstance(found, list) and any(_same(each, wanted) for each in found)
