"""Tool call formats of the model families: outputs as the models write them, and the deltas they become."""

from __future__ import annotations

import json
from itertools import count

import pytest
from test_output_parser import brief, split

from emberline.api.call import Tool
from emberline.api.marker_parser import MarkerParser
from emberline.api.reasoning import (
    COHERE_THINKING,
    GEMMA_THOUGHT,
    GRANITE_THOUGHT,
    KIMI_VL,
    REASONING_STYLES,
    THINK,
    THINK_RESPONSE,
    ReasoningStyle,
)
from emberline.api.tool_styles.cohere import COHERE, COMMAND_R
from emberline.api.tool_styles.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from emberline.api.tool_styles.gemma import GEMMA3
from emberline.api.tool_styles.gemma4 import FUNCTION_GEMMA, GEMMA4
from emberline.api.tool_styles.glm import GLM45, GLM47
from emberline.api.tool_styles.granite import GRANITE
from emberline.api.tool_styles.invoke import DEEPSEEK_V32, MINIMAX
from emberline.api.tool_styles.kimi import KIMI
from emberline.api.tool_styles.phi4 import FUNCTOOLS, PHI4
from emberline.api.tool_styles.pythonic import LFM2, PYTHONIC
from emberline.api.tool_styles.qwen3_coder import QWEN3_CODER, SEED
from emberline.api.tool_styles.registry import TOOL_STYLES
from emberline.api.tool_styles.style import ToolStyle
from emberline.wire.deltas import ToolCallArguments, ToolCallStart

PARAMETERS = {
    "$defs": {"level": {"enum": ["low", "high"]}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "note": {"type": ["string", "null"]},
        "level": {"$ref": "#/$defs/level"},
        "size": {"anyOf": [{"type": "number"}, {"type": "string"}]},
    },
}
TOOLS = [Tool("weather", "", PARAMETERS), Tool("time"), Tool("f")]


def make_parser(style: ToolStyle | None, reasoning: ReasoningStyle | None = None, inside: bool = False) -> MarkerParser:
    ids = count()
    return MarkerParser(0, lambda: f"{next(ids):024d}", style, reasoning, inside, TOOLS)


def call(name: str, arguments: str) -> list[tuple[str, ...]]:
    return [("call", name), ("args", arguments)]


OSLO = call("weather", '{"city": "Oslo", "days": 2}')
NOW = call("time", "{}")
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
KIMI_CALL = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"

CASES: dict[str, tuple[ToolStyle, str, list[tuple[str, ...]]]] = {
    "qwen": (
        QWEN3_CODER,
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        [("text", "I look.\n"), *OSLO, *NOW],
    ),
    "qwen, one line": (
        QWEN3_CODER,
        "<tool_call><function=weather><parameter=city>Oslo</parameter><parameter=days>2</parameter></function></tool_call>",
        OSLO,
    ),
    "qwen without tool_call": (
        QWEN3_CODER,
        "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>ok",
        [*call("weather", '{"city": "Oslo"}'), ("text", "ok")],
    ),
    "qwen, text in a value": (
        QWEN3_CODER,
        '<tool_call>\n<function=weather>\n<parameter=city>\n\nif a < "b":\n\tc</p\\\n\n</parameter>\n</function>'
        "\n</tool_call>",
        call("weather", '{"city": "\\nif a < \\"b\\":\\n\\tc</p\\\\\\n"}'),
    ),
    "qwen, not a call": (QWEN3_CODER, "<tool_call>\n<fun>x", [("text", "<tool_call>\n<fun>x")]),
    "qwen, ended early": (
        QWEN3_CODER,
        "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n",
        call("weather", '{"days": 2}'),
    ),
    "qwen, ended in a value": (
        QWEN3_CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2",
        [*call("weather", '{"city": "Oslo"'), ("text", "\n<parameter=days>\n2")],
    ),
    "qwen, ended in a string": (
        QWEN3_CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n\n</para",
        [*call("weather", '{"city": "Oslo\\n'), ("text", "\n</para")],
    ),
    "seed": (
        SEED,
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n</function>\n"
        "</seed:tool_call>",
        OSLO,
    ),
    "minimax": (
        MINIMAX,
        'Hm.<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
        [("text", "Hm."), *OSLO, *NOW],
    ),
    "deepseek v3.2": (
        DEEPSEEK_V32,
        'Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("text", "Hm.\n\n"), *OSLO, *NOW],
    ),
    "lfm2": (LFM2, "<|tool_call_start|>[weather(city='Oslo', days=2)]<|tool_call_end|>Ok", [*OSLO, ("text", "Ok")]),
    "glm 4.5": (
        GLM45,
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        [*OSLO, *NOW],
    ),
    "glm 4.7": (
        GLM47,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"
        "</tool_call><tool_call>time</tool_call>Done",
        [*OSLO, *NOW, ("text", "Done")],
    ),
    "glm, not a call": (GLM45, '<tool_call>{"name": 1}', [("text", '<tool_call>{"name": 1}')]),
    "deepseek v3": (
        DEEPSEEK_V3,
        f'Hm.<｜tool▁calls▁begin｜>{V3}weather\n```json\n{{"city": "Oslo", "days": 2}}\n```<｜tool▁call▁end｜>\n'
        f"{V3}time\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("text", "Hm."), *OSLO, *NOW],
    ),
    "deepseek v3.1": (
        DEEPSEEK_V31,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo", "days": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*OSLO, *NOW],
    ),
    "deepseek without arguments": (
        DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        NOW,
    ),
    "deepseek, not a call": (DEEPSEEK_V31, "<｜tool▁call▁begin｜>a b{", [("text", "<｜tool▁call▁begin｜>a b{")]),
    "kimi": (
        KIMI,
        f'Wait<|tool_calls_section_begin|>{KIMI_CALL}{{"city": "Oslo", "days": 2}}<|tool_call_end|><|tool_call_begin|>'
        "functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [("text", "Wait"), *OSLO, *NOW],
    ),
    "kimi, no section": (KIMI, f'{KIMI_CALL}{{"city": "Oslo", "days": 2}}<|tool_call_end|>', OSLO),
    "kimi, no prefix": (KIMI, "<|tool_call_begin|>time:3<|tool_call_argument_begin|>{}<|tool_call_end|>", NOW),
    "cohere": (
        COHERE,
        "<|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo", "days": 2}},\n'
        '    {"tool_call_id": "1", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>',
        [*OSLO, *NOW],
    ),
    "command-r": (
        COMMAND_R,
        'Well.\nAction: ```json\n[\n    {\n        "tool_name": "weather",\n'
        '        "parameters": {"city": "Oslo", "days": 2}\n    },\n'
        '    {\n        "tool_name": "time",\n        "parameters": {}\n    }\n]```',
        [("text", "Well.\n"), *OSLO, *NOW],
    ),
    "command-r, not a call": (COMMAND_R, "Action: ```json\n7```", [("text", "Action: ```json\n7```")]),
    "granite": (
        GRANITE,
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, '
        '{"name": "time", "arguments": {}}]',
        [*OSLO, *NOW],
    ),
    "granite, tag": (GRANITE, '<tool_call>[{"name": "time", "arguments": {}}]</tool_call>', NOW),
    "phi": (PHI4, '<|tool_call|>[{"name": "time", "arguments": {}}]<|/tool_call|>', NOW),
    "phi, functools": (PHI4, 'functools[{"name": "time", "arguments": {}}]', NOW),
    "functools in text": (FUNCTOOLS, "from functools import wraps", [("text", "from functools import wraps")]),
    "pythonic": (PYTHONIC, '[weather(city="Oslo", days=2), time()]', [*OSLO, *NOW]),
    "pythonic, marked": (
        PYTHONIC,
        "Well.<|python_start|>[weather(city='Oslo', days=2)]<|python_end|>",
        [("text", "Well."), *OSLO],
    ),
    "pythonic, values": (
        PYTHONIC,
        """[f(a=-1.5, b=True, c=None, d=['x', ("y",), {'k': false}], e="it's)", g='''q"', (\n''', h="\\u00e9\\/")]""",
        call(
            "f",
            '{"a": -1.5, "b": true, "c": null, "d": ["x", ["y"], {"k": false}], "e": "it\'s)", "g": "q\\"\', (\\n", '
            '"h": "é/"}',
        ),
    ),
    "pythonic, JSON": (PYTHONIC, '{"name": "time", "parameters": {}}', NOW),
    "pythonic, a list": (PYTHONIC, "[1, 2] and [x]", [("text", "[1, 2] and [x]")]),
    "pythonic, a variable": (PYTHONIC, "[f(a=b)]", [("text", "[f(a=b)]")]),
    "pythonic, an operation": (PYTHONIC, "[f(a=1+1)]", [("text", "[f(a=1+1)]")]),
    "pythonic, a call": (PYTHONIC, "[f(a=g())]", [("text", "[f(a=g())]")]),
    "pythonic, f-string": (PYTHONIC, '[f(a=f"{x}")]', [("text", '[f(a=f"{x}")]')]),
    "pythonic, positional": (PYTHONIC, "[f(1)]", [("text", "[f(1)]")]),
    "pythonic, later error": (
        PYTHONIC,
        "[f(a=1, b=x)]",
        [("call", "f"), ("args", '{"a": 1'), ("text", " b=x)]")],
    ),
    "pythonic, numbers that no float holds": (
        PYTHONIC,
        '[f(a=1e999, b=[None, -2E+400], c={"k": "\\ud83d\\ude00", "l": True}, d="\\ud800")]',
        call("f", '{"a": 1e999, "b": [null, -2E+400], "c": {"k": "😀", "l": true}, "d": "\\ud800"}'),
    ),
    "gemma 3": (
        GEMMA3,
        "Sure:\n```tool_code\nweather(city='Oslo', days=2)\n```\n",
        [("text", "Sure:\n"), *OSLO],
    ),
    "gemma 3, two": (GEMMA3, "```tool_code\nweather(city='Oslo', days=2)\ntime()\n```", [*OSLO, *NOW]),
    "gemma 3, list": (GEMMA3, "```tool_code\n[weather(city='Oslo', days=2), time()]\n```", [*OSLO, *NOW]),
    "gemma 3, code": (GEMMA3, "```tool_code\nprint(1)\n```", [("text", "```tool_code\nprint(1)\n```")]),
    "gemma 4": (
        GEMMA4,
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|><|tool_call>call:time{}<tool_call|>',
        [*OSLO, *NOW],
    ),
    "gemma 4, values": (
        GEMMA4,
        '<|tool_call>call:f{a:[1,true,<|"|>x, }<|"|>],b:{k:null,<|"|>l<|"|>:-2.5},c:word}<tool_call|>',
        call("f", '{"a": [1, true, "x, }"], "b": {"k": null, "l": -2.5}, "c": "word"}'),
    ),
    "functiongemma": (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>",
        OSLO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("style", [s for s in TOOL_STYLES.values() if not s.uses_channels], ids=lambda s: s.name)
def test_call_to_a_tool_that_is_not_offered_is_text(style: ToolStyle, size: int) -> None:
    for calls in ([("print", "{}")], [("print", '{"a": 1}')]):
        text = style.format_calls(calls)
        assert split(text, make_parser(style), size) == [("text", text)]
    text = style.format_calls([("weather", '{"days": 2}'), ("print", "{}")])
    pieces = split(text, make_parser(style), size)
    assert pieces[:2] == call("weather", '{"days": 2}')
    assert not [piece for piece in pieces if piece[0] == "call" and piece[1] != "weather"]
    assert "print" in "".join(piece[1] for piece in pieces if piece[0] == "text")


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("style", [s for s in TOOL_STYLES.values() if s.dropped_markers], ids=lambda s: s.name)
def test_closing_marker_without_a_call_is_dropped(style: ToolStyle, size: int) -> None:
    for marker in style.dropped_markers:
        assert split(f"Done.{marker}", make_parser(style), size) == [("text", "Done.")]
        assert split(f"Done.{marker}\nYes.{marker}", make_parser(style), size) == [("text", "Done.\nYes.")]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_output_of_model_family(case: str, size: int) -> None:
    style, text, expected = CASES[case]
    assert split(text, make_parser(style), size) == expected


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "123", "123"),
        ("city", "true", "true"),
        ("city", '{"a": 1}', '{"a": 1}'),
        ("days", "123", 123),
        ("days", "many", "many"),
        ("tags", '["a", 1]', ["a", 1]),
        ("tags", "[1", "[1"),
        ("note", "null", None),
        ("note", "5", "5"),
        ("level", "1", "1"),
        ("size", "1.5", 1.5),
        ("size", "NaN", "NaN"),
        ("size", '"x"', '"x"'),
        ("unknown", "5", 5),
        ("unknown", "True", True),
        ("unknown", "1e999", "1e999"),
    ],
)
@pytest.mark.parametrize("style", [QWEN3_CODER, GLM45, GLM47, SEED, MINIMAX], ids=lambda style: style.name)
def test_type_of_parameter_follows_schema(style: ToolStyle, key: str, text: str, value: object) -> None:
    document = style.format_calls([("weather", json.dumps({key: text}))])
    (_, (_, arguments)) = split(document, make_parser(style))
    assert json.loads(arguments) == {key: value}


def test_kimi_ids_are_kept_and_new_ones_are_unique() -> None:
    document = f"{KIMI_CALL}{{}}<|tool_call_end|>{KIMI_CALL}{{}}<|tool_call_end|>"
    starts = [piece for piece in make_parser(KIMI).push(document) if isinstance(piece, ToolCallStart)]
    assert [start.id for start in starts] == ["functions.weather:0", "call_" + "0" * 24]


def test_strings_stream_as_they_come_and_other_values_when_complete() -> None:
    parser = make_parser(QWEN3_CODER)
    pushes = [
        "<tool_call>\n<function=weather>\n<par", "ameter=city>\nOs", "lo\n", "</para", "meter>\n<parameter=days>",
        "\n2\n", "</parameter>", "\n</function>", "\n</tool_call>",
    ]  # fmt: skip
    assert [brief(parser.push(text)) for text in pushes] == [
        [],
        [("call", "weather"), ("args", '{"city": "Os')],
        [("args", "lo")],
        [],
        [("args", '"')],
        [],
        [("args", ', "days": 2')],
        [("args", "}")],
        [],
    ]


@pytest.mark.parametrize("style", [s for s in TOOL_STYLES.values() if not s.uses_channels], ids=lambda s: s.name)
def test_arguments_are_prefix_of_final_json_at_all_times(style: ToolStyle) -> None:
    arguments = {"city": 'a"\n</x>é', "days": 12, "tags": [1, {"k": "v"}]}
    document = style.format_calls([("weather", json.dumps(arguments, ensure_ascii=False))])
    parser, joined, lengths = make_parser(style), "", set()
    for char in document:
        for piece in parser.push(char):
            joined += piece.text if isinstance(piece, ToolCallArguments) else ""
        lengths.add(len(joined))
        assert json.dumps(arguments, ensure_ascii=False).startswith(joined)
    assert json.loads(joined) == arguments and len(lengths) >= 4, "the arguments did not stream"


@pytest.mark.parametrize("style", TOOL_STYLES.values(), ids=lambda s: s.name)
def test_no_marker_is_prefix_of_another(style: ToolStyle) -> None:
    """Otherwise the result would depend on how the output is cut."""
    markers = [*style.begin_markers, *style.dropped_markers]
    for reasoning in REASONING_STYLES.values():
        all_markers = [*markers, *reasoning.dropped_markers]
        assert not [(a, b) for a in all_markers for b in all_markers if a != b and a.startswith(b)]


REASONING_CASES: dict[str, tuple[ReasoningStyle, ToolStyle | None, bool, str, list[tuple[str, ...]]]] = {
    "kimi-vl": (KIMI_VL, None, False, "◁think▷Hm.◁/think▷Yes", [("thought", "Hm."), ("text", "Yes")]),
    "granite": (
        GRANITE_THOUGHT,
        None,
        False,
        "Here's my thought process:\nHm. Here is\n\nHere is my response:\n\nYes",
        [("thought", "Hm. Here is"), ("text", "Yes")],
    ),
    "granite 3.3": (
        THINK_RESPONSE,
        None,
        False,
        "<think>Hm.</think><response>Yes</response>",
        [("thought", "Hm."), ("text", "Yes")],
    ),
    "cohere text": (
        COHERE_THINKING,
        None,
        False,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
        [("thought", "Hm."), ("text", "Yes")],
    ),
    "cohere call": (
        COHERE_THINKING,
        COHERE,
        True,
        "Hm.<|END_THINKING|><|START_ACTION|>"
        '[{"tool_call_id": "0", "tool_name": "time", "parameters": {}}]<|END_ACTION|>',
        [("thought", "Hm."), *NOW],
    ),
    "cohere ends reasoning by a call": (
        COHERE_THINKING,
        COHERE,
        True,
        'Hm.<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "time", "parameters": {}}]<|END_ACTION|>',
        [("thought", "Hm."), *NOW],
    ),
    "kimi ends reasoning by a call": (
        THINK,
        KIMI,
        True,
        "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("thought", "Hm."), *NOW],
    ),
    "gemma 4": (
        GEMMA_THOUGHT,
        GEMMA4,
        False,
        "<|channel>thought\nHm.\n<channel|><|tool_call>call:time{}<tool_call|>",
        [("thought", "Hm."), *NOW],
    ),
}


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("case", REASONING_CASES)
def test_reasoning_of_model_family(case: str, size: int) -> None:
    reasoning, style, inside, text, expected = REASONING_CASES[case]
    assert split(text, make_parser(style, reasoning, inside), size) == expected
