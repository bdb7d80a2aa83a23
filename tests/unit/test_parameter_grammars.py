"""Grammars of tool calls whose parameters are not one JSON object: types, optional parameters and strict schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_tools import accepts, compiler

from emberline.api.call import Tool, ToolChoice
from emberline.api.rule_writer import RuleWriter
from emberline.api.tool_styles.gemma4 import GEMMA4
from emberline.api.tool_styles.glm import GLM47
from emberline.api.tool_styles.invoke import DEEPSEEK_V32
from emberline.api.tool_styles.parameter_schema import ParameterSchema
from emberline.api.tool_styles.python_rules import PythonLiteralRules
from emberline.api.tool_styles.pythonic import PYTHONIC
from emberline.api.tool_styles.qwen3_coder import QWEN3_CODER
from emberline.api.tool_styles.style import ToolStyle
from emberline.api.tools import build_tool_call_grammar
from emberline.core.errors import InvalidRequest
from emberline.core.params import GrammarSpec
from emberline.engine.grammar import GrammarCompiler

__all__ = ["compiler"]

STYLES = [QWEN3_CODER, GLM47, DEEPSEEK_V32, PYTHONIC, GEMMA4]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1},
        "city": {"type": "string"},
        "level": {"anyOf": [{"const": "low"}, {"type": "null"}]},
        "wet": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def forced(style: ToolStyle, schema: dict[str, Any], strict: bool = True) -> GrammarSpec:
    grammar = build_tool_call_grammar([Tool("f", "", schema, strict)], ToolChoice("required"), style, True)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ('{"city": "Oslo, \\"N\\" <b>"}', True),
        ('{"days": 2, "city": "Oslo", "level": "low", "wet": true}', True),
        ('{"days": 2, "city": "Oslo", "wet": false}', True),
        ('{"city": "", "level": null}', True),
        ('{"days": 2}', False),
        ("{}", False),
        ('{"days": 0, "city": "Oslo"}', False),
        ('{"days": "2x", "city": "Oslo"}', False),
        ('{"city": "Oslo", "level": "high"}', False),
        ('{"city": "Oslo", "wind": 1}', False),
    ],
)
def test_grammar_enforces_schema(compiler: GrammarCompiler, style: ToolStyle, arguments: str, fits: bool) -> None:
    assert accepts(compiler, forced(style, SCHEMA), style.format_calls([("f", arguments)])) == fits


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_lenient_tools_allow_other_parameters(compiler: GrammarCompiler, style: ToolStyle) -> None:
    for schema in ({}, {"properties": {"a": {"type": "string"}}}, {"properties": {"a": {}}}):
        grammar = forced(style, schema, strict=False)
        for arguments in ("{}", '{"a": "x"}', '{"b": 1}', '{"a": "x", "b": "y", "c": 2}'):
            assert accepts(compiler, grammar, style.format_calls([("f", arguments)])), (schema, arguments)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_nested_values(compiler: GrammarCompiler, style: ToolStyle) -> None:
    schema = {"properties": {"a": {"type": "array"}, "b": {"type": "object"}}, "required": ["a"]}
    text = style.format_calls([("f", '{"a": [1, {"k": "v"}], "b": {"l": []}}')])
    assert accepts(compiler, forced(style, schema, strict=False), text)


@pytest.mark.parametrize(
    ("style", "schema", "keyword"),
    [
        (QWEN3_CODER, {"properties": {"a": {"type": "string", "pattern": "x+"}}}, "pattern"),
        (GLM47, {"properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength"),
        (GEMMA4, {"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        (GEMMA4, {"properties": {"a": {"type": "array"}}}, "array"),
        (PYTHONIC, {"anyOf": [{"properties": {}}]}, "anyOf"),
    ],
)
def test_strict_schema_that_cannot_be_enforced_is_rejected(style: ToolStyle, schema: Any, keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=keyword) as caught:
        forced(style, schema)
    assert caught.value.param == "tools"
    assert forced(style, schema, strict=False)


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"leaf": {"type": "boolean"}, "nodes": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["leaf"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {
    "properties": {
        "flags": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"enum": ["x", [None]]}]}},
        "tree": {"$ref": "#/$defs/tree"},
        "by_name": {"type": "object", "additionalProperties": {"type": ["integer", "null"], "minimum": 2}},
        "any": {"description": "whatever"},
        "few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    },
    "$defs": {"tree": TREE},
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"flags": []}, True),
        ({"flags": [True, False, "x", [None]]}, True),
        ({"flags": [None]}, False),
        ({"flags": ["y"]}, False),
        ({"tree": {"leaf": False, "nodes": [{"leaf": True}, {"leaf": True, "nodes": []}]}}, True),
        ({"tree": {"leaf": False, "nodes": [{"leaf": None}]}}, False),
        ({"tree": {"nodes": []}}, False),
        ({"tree": {"leaf": True, "other": 1}}, False),
        ({"by_name": {}}, True),
        ({"by_name": {'an "e": \u00e9': 2, "b": None}}, True),
        ({"by_name": {"a": 1}}, False),
        ({"by_name": {"a": True}}, False),
        ({"any": [{"a": [True, {"b": None}], "c": -1500.5}, "x", {}]}, True),
        ({"any": None}, True),
    ],
)
def test_pythonic_nested_values_are_python_literals(
    compiler: GrammarCompiler, arguments: dict[str, Any], fits: bool, is_strict: bool
) -> None:
    grammar = forced(PYTHONIC, NESTED, is_strict)
    text = PYTHONIC.format_calls([("f", json.dumps(arguments))])
    assert "true" not in text and "null" not in text
    assert accepts(compiler, grammar, text) == fits


def test_pythonic_values_with_other_keywords_are_json(compiler: GrammarCompiler) -> None:
    """Such as the number of an array's items, which a grammar of Python literals does not count."""
    grammar = forced(PYTHONIC, NESTED)
    for text, fits in (("[true]", True), ("[True]", False), ("[true, true]", False)):
        assert accepts(compiler, grammar, f"[f(few={text})]") == fits


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": False},
        {"type": "array", "items": {"type": "object", "required": ["a"]}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 1}}},
        {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
        {"type": "object", "properties": {"a": {"anyOf": [{}], "type": "array"}}},
        {"type": "object", "patternProperties": {"a": {}}},
        {"type": "array", "items": {"enum": []}},
        {"type": "array", "items": {"$ref": "other.json"}},
    ],
)
def test_python_literals_enforce_every_keyword_or_are_not_used(schema: dict[str, Any]) -> None:
    tool = Tool("f", "", {"properties": {"x": schema}})
    literals = PythonLiteralRules(RuleWriter({}), ParameterSchema(tool), "p", is_strict=True)
    assert not literals.can_enforce(schema) and literals.can_enforce(
        {"type": "array", "items": TREE["properties"]["leaf"]}
    )
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    assert not literals.can_enforce(schema)


def test_pythonic_strings_are_restricted(compiler: GrammarCompiler) -> None:
    grammar = forced(PYTHONIC, {"properties": {"a": {"type": "string", "pattern": "^x+$"}}})
    assert accepts(compiler, grammar, '[f(a="xx")]') and not accepts(compiler, grammar, '[f(a="y")]')


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_values_beside_a_type_have_that_type(compiler: GrammarCompiler, style: ToolStyle) -> None:
    for values in ({"type": "string", "enum": ["a", 1]}, {"type": ["string", "null"], "enum": ["a", 1, True]}):
        grammar = forced(style, {"properties": {"x": values}, "required": ["x"], "additionalProperties": False})
        assert accepts(compiler, grammar, style.format_calls([("f", '{"x": "a"}')]))
        assert not accepts(compiler, grammar, style.format_calls([("f", '{"x": 1}')]))
    with pytest.raises(InvalidRequest, match="without a value"):
        forced(style, {"properties": {"x": {"type": "integer", "const": "a"}}})


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize(
    "parameter",
    [
        {"allOf": [{"type": "integer"}]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}], "not": {"const": 3}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"$ref": "#/$defs/size", "minimum": 3},
        {"minimum": 3},
    ],
)
def test_strict_tools_reject_combined_keywords(
    compiler: GrammarCompiler, style: ToolStyle, parameter: dict[str, Any]
) -> None:
    schema = {"properties": {"x": parameter}, "$defs": {"size": {"type": "integer"}}}
    with pytest.raises(InvalidRequest, match="the parameter 'x' of the strict tool 'f' combines"):
        forced(style, schema)
    assert forced(style, schema, strict=False)
