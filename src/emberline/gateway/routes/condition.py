"""Conditions on a call in MongoDB's syntax, compiled to predicates.

An example is {"metadata.plan": {"$in": ["free", "trial"]}}. A missing value equals null, is in a list only if the list
contains null, and is neither greater nor less than any value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from emberline.gateway.routes.pattern_reader import read_pattern


class Facts(Protocol):
    def get(self, path: str) -> Any:
        """Return the value at this path, or None if it is missing."""
        ...


Test: TypeAlias = Callable[[Facts], bool]
_Compare: TypeAlias = Callable[[Any], bool]


def compiled(condition: Mapping[str, Any]) -> Test:
    """Compile a validated condition to a predicate. All fields of the condition must hold."""
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
            negated = compiled(value)
            return lambda facts: not negated(facts)
    operators = value if isinstance(value, Mapping) else {"$eq": value}
    comparisons = [_compare(operator, expected) for operator, expected in operators.items()]
    return lambda facts: all(holds(facts.get(name)) for holds in comparisons)


def _compare(operator: str, wanted: Any) -> _Compare:
    match operator:
        case "$eq":
            return lambda actual: _same(actual, wanted)
        case "$ne":
            return lambda actual: not _same(actual, wanted)
        case "$in":
            return lambda actual: any(_same(actual, each) for each in wanted)
        case "$nin":
            return lambda actual: not any(_same(actual, each) for each in wanted)
        case "$exists":
            return lambda actual: (actual is not None) == wanted
        case "$contains":
            return lambda actual: _contains(actual, wanted)
        case "$regex":
            pattern = read_pattern(wanted)
            return lambda actual: isinstance(actual, str) and pattern.found_in(actual)
        case "$gt":
            return lambda actual: _ordered(actual, wanted) and actual > wanted
        case "$gte":
            return lambda actual: _ordered(actual, wanted) and actual >= wanted
        case "$lt":
            return lambda actual: _ordered(actual, wanted) and actual < wanted
        case "$lte":
            return lambda actual: _ordered(actual, wanted) and actual <= wanted
    raise AssertionError(f"condition with unknown operator {operator} was not validated")


def _same(found: Any, wanted: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true does not equal 1."""
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


def _ordered(found: Any, wanted: Any) -> bool:
    """Return whether both are numbers, or both are strings."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return False
    if isinstance(wanted, str):
        return isinstance(found, str)
    return isinstance(found, int | float)


def _contains(found: Any, wanted: Any) -> bool:
    if isinstance(found, str):
        return isinstance(wanted, str) and wanted in found
    return isinstance(found, list) and any(_same(each, wanted) for each in found)
