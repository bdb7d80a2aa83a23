"""Every output that a tool call grammar admits is read as calls whose arguments match the tool's schema."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emberline.api.call import Tool, ToolChoice
from emberline.api.parser_choice import make_output_parser
from emberline.api.reasoning import HARMONY_ANALYSIS
from emberline.api.tool_styles.registry import TOOL_STYLES
from emberline.api.tool_styles.style import ToolStyle
from emberline.api.tools import build_tool_call_grammar
from emberline.bench.schema_coverage import EOS, NUM_BYTES, draw_output, read_output, write_byte_tokenizer
from emberline.core.errors import InvalidRequest
from emberline.engine.grammar import GrammarCompiler
from emberline.wire.deltas import TextDelta, ToolCallArguments, ToolCallStart

STYLES = list(TOOL_STYLES.values())
NAMES = ["a", "b", "c-d"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")), NUM_BYTES + 1, [EOS])


VALUES = [None, True, False, 0, 7, -2.5, "x", "", "true", "12", [1], {"k": "v"}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
plain = st.sampled_from(TYPES).map(lambda each: {"type": each})
enums = st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(lambda each: {"enum": each})
leaves = st.one_of(
    plain,
    enums,
    st.builds(lambda a, b: {**a, **b}, plain, enums),
    st.sampled_from(VALUES).map(lambda each: {"const": each}),
    st.lists(st.sampled_from(TYPES), unique=True, min_size=1, max_size=3).map(lambda each: {"type": each}),
    st.sampled_from([
        {"type": "integer", "minimum": 1, "maximum": 12},
        {"type": "string", "pattern": "^[a-c]{2,3}$"},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "array", "items": {"type": "number"}, "maxItems": 3, "minItems": 1},
        {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
        {"type": "string", "enum": ["ab", "c", 1], "minLength": 2},
        {"anyOf": [{"const": "p"}, {"type": "null"}], "type": "string"},
        {"$ref": "#/$defs/size"},
        {},
    ]),
)  # fmt: skip


def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    return st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"oneOf": each}),
        st.lists(inner, min_size=2, max_size=2).map(lambda each: {"allOf": each}),
        inner.map(lambda each: {"type": "array", "items": each}),
        st.builds(
            lambda each, closed: {
                "type": "object", "properties": each, "required": list(each)[:1], "additionalProperties": closed
            },
            properties,
            st.booleans(),
        ),
    )  # fmt: skip


parameters = st.builds(
    lambda properties, needed: {
        "type": "object",
        "properties": properties,
        "required": [name for name in needed if name in properties],
        "additionalProperties": False,
        "$defs": {"size": {"type": "string", "enum": ["s", "m"]}},
    },
    st.dictionaries(st.sampled_from(NAMES), st.recursive(leaves, extend, max_leaves=4), min_size=1, max_size=3),
    st.sampled_from([[], ["a"], ["b", "a"]]),
)


def read_calls(style: ToolStyle, output: str, tools: list[Tool]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text beside the calls, and the calls: name and arguments."""
    ids = count()
    reasoning = HARMONY_ANALYSIS if style.uses_channels else None
    parser = make_output_parser(0, lambda: f"{next(ids):024d}", style, reasoning, False, tools)
    assert parser is not None
    text, calls = "", list[tuple[str, str]]()
    for piece in [*parser.push(output), *parser.flush()]:
        match piece:
            case ToolCallStart(name=name):
                calls.append((name, ""))
            case ToolCallArguments(text=part):
                calls[-1] = (calls[-1][0], calls[-1][1] + part)
            case TextDelta(text=part):
                text += part
    return text, calls


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schema=parameters, seed=st.integers(0, 99))
def test_admitted_calls_are_read_and_valid(
    compiler: GrammarCompiler, style: ToolStyle, schema: dict[str, Any], seed: int
) -> None:
    tools = [Tool("f", "", schema, strict=True), Tool("get", "", {}, strict=False)]
    try:
        grammar = build_tool_call_grammar(tools, ToolChoice("required"), style, True)
        assert grammar is not None
        matcher = compiler.compile(grammar)
    except InvalidRequest:
        return  # the format cannot enforce the schema
    output, ending = draw_output(matcher, random.Random(seed))
    if ending != "finished":
        return
    text, calls = read_calls(style, output, tools)
    assert calls and not text.strip(), output
    for name, arguments in calls:
        value = read_output(arguments)
        if name == "f":
            assert jsonschema_rs.validator_for(schema).is_valid(value), (output, arguments)
