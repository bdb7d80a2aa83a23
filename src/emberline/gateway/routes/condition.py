"""Conditions on a request in MongoDB's query syntax, compiled to predicates.

An example is {"metadata.plan": {"$in": ["free", "trial"]}}. A missing value is treated as null: it equals null, is in a
list only if the list contains null, and is neither greater nor less than any value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from emberline.gateway.routes.pattern import compile_pattern


class AttributeSource(Protocol):
    def get(self, path: str) -> Any:
        """Return the value at this path, or None if it is missing."""
        ...


Predicate: TypeAlias = Callable[[AttributeSource], bool]
_Comparison: TypeAlias = Callable[[Any], bool]


def compile_condition(condition: Mapping[str, Any]) -> Predicate:
    """Compile a validated condition to a predicate.

    The predicate holds if every field of the condition holds.
    """
    tests = [_compile_field(name, value) for name, value in condition.items()]
    return tests[0] if len(tests) == 1 else lambda facts: all(test(facts) for test in tests)


def _compile_field(name: str, value: Any) -> Predicate:
    match name:
        case "$and":
            inner = [compile_condition(each) for each in value]
            return lambda facts: all(test(facts) for test in inner)
        case "$or":
            inner = [compile_condition(each) for each in value]
            return lambda facts: any(test(facts) for test in inner)
        case "$not":
            negated = compile_condition(value)
            return lambda facts: not negated(facts)
    operators = value if isinstance(value, Mapping) else {"$eq": value}
    comparisons = [_compile_comparison(operator, expected) for operator, expected in operators.items()]
    return lambda facts: all(holds(facts.get(name)) for holds in comparisons)


def _compile_comparison(operator: str, expected: Any) -> _Comparison:
    match operator:
        case "$eq":
            return lambda actual: _is_equal(actual, expected)
        case "$ne":
            return lambda actual: not _is_equal(actual, expected)
        case "$in":
            return lambda actual: any(_is_equal(actual, each) for each in expected)
        case "$nin":
            return lambda actual: not any(_is_equal(actual, each) for each in expected)
        case "$exists":
            return lambda actual: (actual is not None) == expected
        case "$contains":
            return lambda actual: _contains(actual, expected)
        case "$regex":
            pattern = compile_pattern(expected)
            return lambda actual: isinstance(actual, str) and pattern.is_found_in(actual)
        case "$gt":
            return lambda actual: _is_comparable(actual, expected) and actual > expected
        case "$gte":
            return lambda actual: _is_comparable(actual, expected) and actual >= expected
        case "$lt":
            return lambda actual: _is_comparable(actual, expected) and actual < expected
        case "$lte":
            return lambda actual: _is_comparable(actual, expected) and actual <= expected
    raise AssertionError(f"a validated condition has an unknown operator {operator!r}")


def _is_equal(actual: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true does not equal 1."""
    return bool(actual == expected) and isinstance(actual, bool) == isinstance(expected, bool)


def _is_comparable(actual: Any, expected: Any) -> bool:
    """Return whether both are numbers, or both are strings."""
    if isinstance(actual, bool) or isinstance(expected, bool):
        return False
    if isinstance(expected, str):
        return isinstance(actual, str)
    return isinstance(actual, int | float)


def _contains(actual: Any, expected: Any) -> bool:
    if isinstance(actual, str):
        return isinstance(expected, str) and expected in actual
    return isinstance(actual, list) and any(_is_equal(each, expected) for each in actual)
