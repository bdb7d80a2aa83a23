"""Schemas that the grammar library alone refuses: what the grammar admits, and what is checked at the end."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.bench.schema_coverage import EOS, NUM_BYTES, draw_output, read_output, write_byte_tokenizer
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.engine.grammar import CheckedMatcher, GrammarCompiler, GrammarMatcher
from emberline.engine.grammar_guard import _try_grammar

TEXT, NUMBER = {"type": "string"}, {"type": "number"}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")), NUM_BYTES + 1, [EOS])


def compile_schema(compiler: GrammarCompiler, schema: dict[str, Any]) -> GrammarMatcher:
    return compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))


def feed(matcher: GrammarMatcher, text: str) -> bool:
    """Return whether the grammar admits the text, up to a failed check."""
    return all(matcher.accept(token) or matcher.error is not None for token in text.encode()) and (
        matcher.error is None and EOS in matcher.allowed_tokens()
    )


def shapes(**required: list[str]) -> dict[str, Any]:
    return {"type": "object", "oneOf": [{"required": names} for names in required.values()]}


# Schemas that the grammar itself enforces: values that it admits and values that it does not.
ENFORCED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (shapes(a=["a"], b=["b"]), ['{"a":1}', '{"b":1,"c":2}'], ["{}", '{"a":1,"b":2}']),
    (
        {"properties": {"a": TEXT, "b": TEXT}, **shapes(a=["a"], b=["b"])},
        ['{"a":"x"}', '{"b":"x"}'],
        ['{"a":"x","b":"y"}'],
    ),
    ({"oneOf": [{"type": "string"}, {"type": "string", "format": "made-up"}, {"type": "null"}]}, ["null"], []),
    ({"oneOf": [{"format": "date"}, {"type": "null"}]}, ['"2024-01-31"', "3", "[]"], ["null"]),
    (
        {"oneOf": [{"properties": {"k": {"const": kind}, "v": {"type": kind}}} for kind in ("string", "null")]},
        ['{"k":"string","v":"x"}', '{"k":"null","v":null}'],
        ['{"k":"null","v":"x"}', "{}"],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/node"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}],
         "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}},
        ['{"next":{}}', '"x"'],
        [],
    ),
    (
        {"oneOf": [{"type": "object", "properties": {name: TEXT}, "additionalProperties": False} for name in "ab"]},
        ['{"a":"x"}', '{"b":"x"}'],
        ["{}"],
    ),
    ({"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, ["{}", '{"b":1}', '{"a":1,"b":2}'], ['{"a":1}']),
    (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"], "b": ["a"]}},
        ["{}", '{"a":1,"b":2}'],
        ['{"b":1}'],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": {"properties": {"b": TEXT}}}},
        ['{"b":1}', '{"a":1,"b":"x"}'],
        ['{"a":1,"b":2}'],
    ),
    ({"not": {"type": ["string", "null"]}}, ["1", "[]", "true"], ['"x"', "null"]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
    ({"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, ['{"c":1}'], ['{"b":1}']),
    ({"not": {"not": NUMBER}}, ["1"], ['"x"']),
    ({"type": ["boolean", "null"], "not": {"enum": [True, None]}}, ["false"], ["true", "null"]),
    (
        {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {}},
         "if": {"properties": {"a": {"const": True}}, "required": ["a"]}, "then": {"required": ["b"]}},
        ["{}", '{"a":false}', '{"a":true,"b":1}'],
        ['{"a":true}'],
    ),
    (
        {"type": "array", "items": {"$ref": "#/$defs/x"}, "uniqueItems": True, "minItems": 1,
         "$defs": {"x": {"enum": ["a", 1, "b"], "type": "string"}}},
        ['["a"]', '["a","b"]', '["b", "a"]'],
        ["[]", '["a","a"]', '["b","a","b"]', "[1]"],
    ),
    (
        {"items": {"enum": [1, 2, 3, 4]}, "uniqueItems": True, "maxItems": 3},
        ["[]", '"x"', "[4,2,1]"],
        ["[1,1]", "[4,3,2,1]"],
    ),
    ({"type": "string", "format": "made-up"}, ['"x"'], []),
    ({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": NUMBER}, ['{"xa":1}'], ['{"a":1}']),
    ({"properties": {"a": {}, "b": {}}, "type": "object", "minProperties": 1}, ['{"a":1}', '{"b":1}'], ["{}"]),
    ({"properties": {"oneOf": TEXT, "not": NUMBER, "format": TEXT}}, ['{"oneOf":"x","not":1,"format":"y"}'], []),
    ({"type": "string", "format": "date-time"}, ['"2024-01-31T10:00:59Z"'], ['"2024-01-31T10:00:60Z"']),
    ({"type": "string", "pattern": r"^a\s[\s_]b$"}, ['"a  b"'], ['"a\u00a0 b"', '"a \u00a0b"']),
    (
        {"type": "object", "patternProperties": {r"^\s$": NUMBER}, "additionalProperties": False},
        ['{" ":1}'],
        ['{"\u00a0":1}'],
    ),
    ({"type": "string", "pattern": r"^[\s\S]$"}, ['"\u00a0"', '"x"'], ['"xy"']),
]  # fmt: skip

# Schemas whose violation ends the request: values that are complete, values that end with an error, and the keyword.
CHECKED: list[tuple[dict[str, Any], list[str], list[str], str]] = [
    ({"type": "array", "items": TEXT, "uniqueItems": True}, ['["a","b"]', "[]"], ['["a","a"]'], "uniqueItems at /"),
    ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ['"ac"', '"cb"'], ['"ab"'], "oneOf at /"),
    ({"type": "string", "not": {"const": "x"}}, ['"y"'], ['"x"'], "not at /"),
    ({"type": "array", "contains": {"type": "null"}}, ["[1,null]"], ["[1]"], "contains at /"),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2},
        ['{"a":1,"c":2}'],
        ['{"a":1,"b":2,"c":3}'],
        "maxProperties at /",
    ),
    (
        {"properties": {"a": {"type": "array", "items": NUMBER, "uniqueItems": True}}, "type": "object"},
        ['{"a":[1,2]}'],
        ['{"a":[1,1.0]}'],
        "uniqueItems at /a",
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda each: json.dumps(each)[:40])
def test_grammar_enforces(compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    for text in good:
        assert is_valid(json.loads(text)) and feed(compile_schema(compiler, schema), text), text
    for text in bad:
        matcher = compile_schema(compiler, schema)
        assert not feed(matcher, text) and type(matcher) is GrammarMatcher, text


@pytest.mark.parametrize(("schema", "good", "bad", "violation"), CHECKED, ids=lambda each: json.dumps(each)[:40])
def test_violation_ends_the_request(
    compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str], violation: str
) -> None:
    for text in good:
        matcher = compile_schema(compiler, schema)
        assert feed(matcher, text) and matcher.is_complete, text
    for text in bad:
        matcher = compile_schema(compiler, schema)
        *most, last = text.encode()
        assert all(matcher.accept(token) for token in most) and matcher.error is None
        fork = matcher.fork()
        matcher.accept(last)
        assert matcher.error == f"the value violates {violation}" and not matcher.is_complete
        assert fork.error is None and matcher.fork().error == matcher.error


def test_values_inside_other_text_are_checked(compiler: GrammarCompiler) -> None:
    part = {"name": "v", "json_schema": {"type": "array", "uniqueItems": True, "items": NUMBER}}
    composed = {"grammars": [{"lark_grammar": 'start: TEXT ("<" @v ">")*\nTEXT: /[a-z]*/'}, part]}
    matcher = compiler.compile(GrammarSpec("grammar", json.dumps(composed)))
    assert feed(matcher, "think<[1,2]><[]>") and feed(matcher, "<[3]>")
    assert not feed(matcher, "<[3,3]") and matcher.error == "the value violates uniqueItems at /"


def test_trial_of_a_checked_grammar_passes(compiler: GrammarCompiler) -> None:
    """A trial draws random tokens, which may violate the check."""
    never = {"enum": ["a", "b"], "not": {"pattern": "."}}
    assert _try_grammar(compiler, GrammarSpec("json_schema", json.dumps(never))) is None


def test_lenient_schemas_are_not_checked(compiler: GrammarCompiler) -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    grammar = {"grammars": [{"lark_grammar": "start: @v"}, {"name": "v", "json_schema": lenient}]}
    matcher = compiler.compile(GrammarSpec("grammar", json.dumps(grammar)))
    assert feed(matcher, "[1, 1]") and not isinstance(matcher, CheckedMatcher)


NAMES = ["a", "b", "c"]
leaves = st.sampled_from(
    [TEXT, NUMBER, {"type": "null"}, {"const": "x"}, {"enum": ["y", 1, None]}, {}, {"type": "integer"}]
)
needed = st.sampled_from([["a"], ["b"], ["c"], ["a", "b"], ["b", "c"]])
some_or_none = needed | st.just([])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)},
        optional={
            "required": some_or_none,
            "additionalProperties": st.booleans(),
            "dependencies": st.dictionaries(st.sampled_from(NAMES), needed, max_size=2),
            "not": st.fixed_dictionaries({"required": needed}),
            "oneOf": st.lists(st.fixed_dictionaries({"required": some_or_none}), min_size=1, max_size=3),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
        },
    )


def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.lists(inner, min_size=1, max_size=3)
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner}, optional={"uniqueItems": st.booleans(), "maxItems": st.just(2)}
    )
    conditions = st.fixed_dictionaries({"if": inner, "then": inner, "else": inner})
    return objects(inner) | arrays | conditions | st.builds(lambda each: {"oneOf": each}, members)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.recursive(leaves, extend, max_leaves=5), st.integers(0, 9))
def test_finished_outputs_are_valid(compiler: GrammarCompiler, schema: dict[str, Any], seed: int) -> None:
    try:
        matcher = compile_schema(compiler, schema)
    except InvalidRequest:
        return
    output, ending = draw_output(matcher, random.Random(seed))
    if ending == "finished":
        assert jsonschema_rs.validator_for(schema).is_valid(read_output(output)), output
