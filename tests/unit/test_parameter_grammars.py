"""Grammars of tool calls whose parameters are not one JSON object: types, optional parameters and strict schemas."""

from __future__ import annotations

from typing import Any

import pytest
from test_tools import accepts, compiler

from emberline.api.call import Tool, ToolChoice
from emberline.api.tool_styles.gemma4 import GEMMA4
from emberline.api.tool_styles.glm import GLM47
from emberline.api.tool_styles.invoke import DEEPSEEK_V32
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


def test_pythonic_strings_are_restricted(compiler: GrammarCompiler) -> None:
    grammar = forced(PYTHONIC, {"properties": {"a": {"type": "string", "pattern": "^x+$"}}})
    assert accepts(compiler, grammar, '[f(a="xx")]') and not accepts(compiler, grammar, '[f(a="y")]')
