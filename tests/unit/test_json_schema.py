"""SchemaChecker: its verdicts beside those of jsonschema_rs, the violations it names, and hostile schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.json_schema import MAX_CHECK_STEPS, SchemaChecker, UncheckableSchema

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
names = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, 1.0, 2.5, -3, 10**20]) | st.sampled_from(["", "a", "ab", "é1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def keyword(name: str, value: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return value.map(lambda each: {name: each})


def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several, named = st.lists(inner, min_size=1, max_size=3), st.dictionaries(names, inner, max_size=2)
    sizes = st.integers(0, 3)
    one = st.one_of(
        *(keyword(name, several) for name in ("allOf", "anyOf", "oneOf", "prefixItems")),
        *(keyword(name, inner) for name in ("not", "items", "contains", "additionalProperties")),
        *(keyword(name, named) for name in ("properties", "dependentSchemas")),
        *(keyword(f"{limit}{what}", sizes) for limit in ("min", "max") for what in ("Items", "Properties", "Length")),
        *(keyword(name, st.integers(-2, 3)) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
        keyword("required", st.lists(names, unique=True, max_size=2)),
        keyword("dependentRequired", st.dictionaries(names, st.lists(names, unique=True, max_size=2), max_size=2)),
        keyword("propertyNames", st.sampled_from([{"maxLength": 1}, {"enum": ["a", "b"]}, False])),
        keyword("patternProperties", st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2)),
        keyword("pattern", st.sampled_from(["^a", r"^\w*$", r"\d"])),
        keyword("multipleOf", st.sampled_from([2, 0.5])),
        st.just({"uniqueItems": True}),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
    )
    return st.lists(one, min_size=1, max_size=3).map(lambda each: {k: v for part in each for k, v in part.items()})


simple = (
    st.booleans() | keyword("type", types) | keyword("const", values) | keyword("enum", st.lists(values, max_size=3))
)
schemas = st.recursive(simple, extend, max_leaves=6).filter(lambda each: isinstance(each, dict))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(schemas, st.lists(values, min_size=1, max_size=4))
def test_verdicts_are_those_of_another_validator(schema: dict[str, Any], values: list[Any]) -> None:
    checker = SchemaChecker(schema)
    validator = jsonschema_rs.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    for value in values:
        assert (checker.find_violation(json.dumps(value)) is None) == validator.is_valid(value), value


CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"properties": {"a": {"uniqueItems": True}}}, '{"a": [1, true, "1"]}', None),
    ({"properties": {"a": {"uniqueItems": True}}}, '{"a": [1, 2, 1.0]}', "uniqueItems at /a"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1, "b": 2}', "oneOf at /"),
    ({"dependencies": {"a": ["b"]}}, '{"a": 1}', "required at /"),
    ({"items": {"not": {"const": 3}}}, "[1, 3]", "not at /1"),
    ({"additionalProperties": False, "properties": {"a": {}}}, '{"b": 1}', "no value is allowed at /b"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, "1", "type at /"),
    ({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}}, "1", "type at /"),
    ({"$schema": DRAFT_7, "allOf": [{"$ref": "#/x", "type": "string"}], "x": {}}, "1", None),
    ({"items": [{"type": "null"}], "additionalItems": False}, "[null, 1]", "no value is allowed at /1"),
    ({"minimum": 3, "exclusiveMinimum": True}, "3", "minimum at /"),
    ({"multipleOf": 0.01}, "19.99", None),
    ({"format": "date"}, '"2023-02-29"', "format at /"),
    ({"format": "date-time"}, '"2024-02-29T10:00:00Z"', None),
    ({"format": "ipv4"}, '"1.2.3.400"', "format at /"),
    ({"format": "colour"}, '"x"', None),
    ({"pattern": "^\\u00e9\\/$"}, '"é/"', None),
    ({}, "{", "the value cannot be checked: JSONDecodeError"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "violation"), CASES)
def test_violation_names_keyword_and_place(schema: dict[str, Any], text: str, violation: str | None) -> None:
    assert SchemaChecker(schema).find_violation(text) == violation


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"unevaluatedItems": False}, "unevaluatedItems"),
        ({"$ref": "#"}, "itself"),
        ({"items": {"$ref": "other.json"}}, "other.json"),
        ({"items": {"$ref": "#/$defs/none"}}, "none"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "pattern"),
    ],
)
def test_schemas_that_cannot_be_checked_are_refused(schema: dict[str, Any], match: str) -> None:
    with pytest.raises(UncheckableSchema, match=match):
        SchemaChecker(schema).ensure_checkable()


def test_values_of_an_enum_are_filtered() -> None:
    values = [f"value {i}" for i in range(5000)]
    checker = SchemaChecker({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}})
    assert checker.list_matching([*values, 1], {"$ref": "#/$defs/a", "enum": [*values, 1]}) == values
    assert checker.list_matching([1, "x"], {"unevaluatedItems": False}) == [1, "x"], "it cannot be checked"


def doubling(levels: int) -> dict[str, Any]:
    """Return a schema that takes 2 ** levels steps to check a value that violates it."""
    defs: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**defs, f"d{levels}": False}, "$ref": "#/$defs/d0"}


def test_work_is_limited() -> None:
    assert SchemaChecker(doubling(3)).find_violation("1") == "anyOf at /"
    assert f"{MAX_CHECK_STEPS} steps" in str(SchemaChecker(doubling(40)).find_violation("1"))
    tree = SchemaChecker({"items": {"$ref": "#"}, "uniqueItems": True})
    assert tree.find_violation("[" * 50 + "]" * 50) is None
    assert "nested too deeply" in str(tree.find_violation("[" * 900 + "]" * 900))


@pytest.mark.parametrize(
    "schema",
    [{"minLength": "x"}, {"enum": 3}, {"required": [[]]}, {"multipleOf": 0}, {"properties": 3}, {"oneOf": {}}],
)
def test_malformed_keywords_raise_nothing(schema: dict[str, Any]) -> None:
    for text in ('"a"', "1", "1e999999999", '{"a": 1}', "[1]", "9" * 5000):
        SchemaChecker(schema).find_violation(text)
