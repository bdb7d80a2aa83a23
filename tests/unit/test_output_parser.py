"""OutputParser for each tool style: whole outputs and the deltas they become."""

from __future__ import annotations

from itertools import count

import pytest

from emberline.api.call import Tool
from emberline.api.marker_parser import MIN_MARKER_CHARS, MarkerParser
from emberline.api.output_parser import OutputParser, Piece, merge_adjacent_deltas
from emberline.api.reasoning import MAGISTRAL, THINK, ReasoningStyle
from emberline.api.tool_styles.call_reader import MAX_HEAD_CHARS
from emberline.api.tool_styles.registry import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, TOOL_STYLES
from emberline.api.tool_styles.style import ToolStyle
from emberline.wire.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

TOOLS = [Tool(name) for name in ("f", "g", "get", "café", "get_weather")]


def make_parser(
    style: ToolStyle | None = None, reasoning: ReasoningStyle | None = None, inside: bool = False
) -> OutputParser:
    ids = count()
    return MarkerParser(0, lambda: f"{next(ids):024d}", style, reasoning, inside, TOOLS)


def brief(pieces: list[Piece]) -> list[tuple[str, ...]]:
    """Return the pieces as short tuples without ids."""
    short: list[tuple[str, ...]] = []
    for piece in merge_adjacent_deltas(pieces):
        match piece:
            case TextDelta(text=text):
                short.append(("text", text))
            case ReasoningDelta(text=text):
                short.append(("thought", text))
            case ToolCallStart(name=name):
                short.append(("call", name))
            case ToolCallArguments(text=text):
                short.append(("args", text))
    return short


def split(text: str, parser: OutputParser, size: int = 0) -> list[tuple[str, ...]]:
    chunks = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return brief([*pieces, *parser.flush()])


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = [("call", "f"), ("args", '{"a": 1}')]
G = [("call", "g"), ("args", "{}")]

BARE = '{"name": "f", "arguments": {"a": 1}}'
MISTAKEN_HERMES_CASES = {
    "without markers": (BARE, F),
    "white space around": (f"\n{BARE}\n", F),
    "two": (f"{BARE}\n{BARE}", [*F, *F]),
    "code block": (f"```json\n{BARE}\n```", F),
    "code block of no language": (f"```\n{BARE}\n```", F),
    "code block without its end": (f"```json\n{BARE}", F),
    "text after": (f"```json\n{BARE}\n```\nDone.", [*F, ("text", "\nDone.")]),
    "unknown tool": ('{"name": "h", "arguments": {}}', [("text", '{"name": "h", "arguments": {}}')]),
    "JSON": ('{"a": 1}', [("text", '{"a": 1}')]),
    "JSON in a code block": ('```json\n{"a": 1}\n```', [("text", '```json\n{"a": 1}\n```')]),
    "code": ("```python\nf({})\n```", [("text", "```python\nf({})\n```")]),
    "not at the start": (f"Try {BARE}", [("text", f"Try {BARE}")]),
    "with markers": (CALL, F),
    "text and a call with markers": ("Well. " + CALL, [("text", "Well. "), *F]),
}

HERMES_CASES = {
    "text": ("just text", [("text", "just text")]),
    "call": (CALL, F),
    "text before": ("Well. " + CALL, [("text", "Well. "), *F]),
    "text after": (CALL + "\nDone.", [*F, ("text", "\nDone.")]),
    "space after is dropped": (CALL + "\n \n", F),
    "space before is dropped": ("\n" + CALL, F),
    "only space": (" \n", [("text", " \n")]),
    "two": (CALL + "\n" + CALL.replace('"f"', '"g"').replace('{"a": 1}', "{}"), [*F, *G]),
    "text between": (CALL + " and " + CALL, [*F, ("text", " and "), *F]),
    "tight": ('<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>', F),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', F),
    "other keys": (
        '<tool_call>{"id": 7, "x": [1, {"y": "}"}], "name": "f", "arguments": {"a": 1}, "z": null}</tool_call>',
        F,
    ),
    "parameters too": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', F),
    "no arguments": ('<tool_call>{"name": "g"}</tool_call>', G),
    "escapes in the name": (
        '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>',
        [("call", "café"), ("args", "{}")],
    ),
    "braces and quotes in strings": (
        '<tool_call>{"name": "f", "arguments": {"s": "}\\"{</tool_call>\\\\", "n": [{"m": {}}]}}</tool_call>!',
        [("call", "f"), ("args", '{"s": "}\\"{</tool_call>\\\\", "n": [{"m": {}}]}'), ("text", "!")],
    ),
    "not json": ("<tool_call>hello</tool_call>", [("text", "<tool_call>hello</tool_call>")]),
    "a tool that is not offered": (
        CALL.replace('"f"', '"h"') + CALL,
        [("text", CALL.replace('"f"', '"h"')), *F],
    ),
    "the second tool is not offered": (
        CALL + "\n" + CALL.replace('"f"', '"h"'),
        [*F, ("text", "\n" + CALL.replace('"f"', '"h"'))],
    ),
    "closing marker without a call": ("Done.\n</tool_call>\n", [("text", "Done.\n\n")]),
    "closing marker first": ("</tool_call>\nDone.", [("text", "\nDone.")]),
    "closing marker twice": (CALL + "</tool_call>" + CALL, [*F, *F]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', [("text", '<tool_call>{"arguments": {}}</tool_call>')]),
    "empty name": ('<tool_call>{"name": "", "arguments": {}}', [("text", '<tool_call>{"name": "", "arguments": {}}')]),
    "half a surrogate": ('<tool_call>{"name": "\\ud800"}', [("text", '<tool_call>{"name": "\\ud800"}')]),
    "arguments no object": (
        '<tool_call>{"name": "f", "arguments": "x"}',
        [("text", '<tool_call>{"name": "f", "arguments": "x"}')],
    ),
    "refused, then a call": ("<tool_call>" + CALL, [("text", "<tool_call>"), *F]),
    "refused with space": ("ok\n<tool_call> no", [("text", "ok\n<tool_call> no")]),
    "near marker": ("a <tool_cal b <<tool_call>> c", [("text", "a <tool_cal b <<tool_call>> c")]),
    "cut in the marker": ("a <tool_c", [("text", "a <tool_c")]),
    "cut in the head": ('<tool_call>{"name": "f", "argu', [("text", '<tool_call>{"name": "f", "argu')]),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "x', [("call", "f"), ("args", '{"a": "x')]),
    "cut before the end": ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_', F),
    "cut before the brace": ('<tool_call>{"name": "f", "arguments": {"a": 1}', F),
    "end left out": ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n' + CALL, [*F, *F]),
    "junk before the brace": ('<tool_call>{"name": "f", "arguments": {"a": 1} oops}', [*F, ("text", " oops}")]),
    "junk before the end": ('<tool_call>{"name": "f", "arguments": {"a": 1}} oops', [*F, ("text", " oops")]),
    "think is text here": ("<think>x</think>", [("text", "<think>x</think>")]),
}
LLAMA_CASES = {
    "bare": ('{"name": "f", "parameters": {"a": 1}}', F),
    "bare after space": ('\n {"name": "f", "parameters": {"a": 1}}\n', F),
    "tagged": ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', F),
    "tagged after text": ('I see.<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("text", "I see."), *F]),
    "several": ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [*F, *G]),
    "with type": ('{"type": "function", "name": "f", "parameters": {"a": 1}}', F),
    "an answer in JSON": ('{"name": "Bob"}', [("text", '{"name": "Bob"}')]),
    "another": (' {"a": [1, 2]}', [("text", ' {"a": [1, 2]}')]),
    "code": ('<|python_tag|>search.call(query="x")', [("text", '<|python_tag|>search.call(query="x")')]),
    "not later": ('So: {"name": "f", "parameters": {}}', [("text", 'So: {"name": "f", "parameters": {}}')]),
    "text after": ('{"name": "f", "parameters": {"a": 1}}; no', [*F, ("text", "; no")]),
}
MISTRAL_CASES = {
    "list": ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', F),
    "list of two": ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [*F, *G]),
    "object": ('[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', F),
    "text first": ('Hm[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', [("text", "Hm"), *F]),
    "args": ('[TOOL_CALLS]f[ARGS]{"a": 1}', F),
    "two args": ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [*F, *G]),
    "call id": ('[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}', F),
    "no args marker": ('[TOOL_CALLS]f{"a": 1}', F),
    "empty list": ("[TOOL_CALLS][]", [("text", "[TOOL_CALLS][]")]),
    "bad second": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"nam": 2}]',
        [*F, ("text", ', {"nam": 2}]')],
    ),
    "no call": ("[TOOL_CALLS] sorry!", [("text", "[TOOL_CALLS] sorry!")]),
    "near": ("[TOOL_CALLS]f[ARG]{}", [("text", "[TOOL_CALLS]f[ARG]{}")]),
    "cut list": ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', F),
    "a list in text": ("[1, 2] [TOOL", [("text", "[1, 2] [TOOL")]),
}
CASES = [
    *((HERMES, f"hermes: {name}", *case) for name, case in HERMES_CASES.items()),
    *(
        (HERMES.accepting_mistakes(), f"hermes, mistaken: {name}", *case)
        for name, case in MISTAKEN_HERMES_CASES.items()
    ),
    *((LLAMA3, f"llama3: {name}", *case) for name, case in LLAMA_CASES.items()),
    *(
        (style, f"{style.name}: {name}", *case)
        for style in (MISTRAL, MISTRAL_ARGS)
        for name, case in MISTRAL_CASES.items()
    ),
]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(("style", "name", "text", "expected"), CASES, ids=[case[1] for case in CASES])
def test_tool_calls(style: ToolStyle, name: str, text: str, expected: list[tuple[str, ...]], size: int) -> None:
    assert split(text, make_parser(style), size) == expected


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes", False, [("thought", "hm"), ("text", "Yes")]),
        ("\n<think>hm</think>Yes", False, [("thought", "hm"), ("text", "Yes")]),
        ("\nhm\n\nwell\n</think>\nYes\n", True, [("thought", "hm\n\nwell"), ("text", "Yes\n")]),
        ("<think>\n\n</think>\n\nYes", False, [("text", "Yes")]),
        ("<think>cut", False, [("thought", "cut")]),
        ("cut \n</thi", True, [("thought", "cut \n</thi")]),
        (" No <think>x</think>", False, [("text", " No <think>x</think>")]),
        ("<thin", False, [("text", "<thin")]),
        ("<think>a " + CALL + "</think>" + CALL, False, [("thought", "a " + CALL), *F]),
        ("<think>a</think>\n" + CALL, False, [("thought", "a"), *F]),
        ("", True, []),
    ],
)
def test_reasoning(text: str, inside: bool, expected: list[tuple[str, ...]], size: int) -> None:
    assert split(text, make_parser(HERMES, THINK, inside), size) == expected


def test_reasoning_without_tools_and_with_other_markers() -> None:
    assert split("[THINK]a[/THINK]" + CALL, make_parser(None, MAGISTRAL)) == [("thought", "a"), ("text", CALL)]


def test_plain_text_is_not_held_back() -> None:
    parser = make_parser()
    assert brief(parser.push(CALL + " <")) == [("text", CALL + " <")]


def test_arguments_stream_after_complete_name() -> None:
    parser = make_parser(HERMES)
    pushes = ["Hi <tool", '_call>{"name": "ge', 't", "arguments": ', '{"a": ', '"b', '"}', "}</tool_call>", " end"]
    assert [brief(parser.push(text)) for text in pushes] == [
        [("text", "Hi ")],
        [],
        [],
        [("call", "get"), ("args", '{"a": ')],
        [("args", '"b')],
        [("args", '"}')],
        [],
        [("text", " end")],
    ]
    assert parser.flush() == [] and parser.num_calls == 1


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    parser = make_parser(HERMES)
    assert [brief(parser.push(text)) for text in ["a", "<", "b", " <tool", "s"]] == [
        [("text", "a")], [], [("text", "<b")], [("text", " ")], [("text", "<tools")],
    ]  # fmt: skip


def test_call_slots_and_ids() -> None:
    starts = [p for p in make_parser(HERMES).push(CALL + CALL) if isinstance(p, ToolCallStart)]
    assert [(p.slot, p.id) for p in starts] == [(0, "call_" + "0" * 24), (1, "call_" + "0" * 23 + "1")]


def test_endless_call_head_becomes_text() -> None:
    for head in ('<tool_call>{"name": "', "<tool_call>" + " " * MAX_HEAD_CHARS, '<tool_call>{"name": "f", "x": "'):
        text = head + "x" * (3 * MAX_HEAD_CHARS)
        parser = make_parser(HERMES)
        assert brief(parser.push(text)) == [("text", text)]


WHOLE_ARGUMENTS = ['{"city": "Paris"}', '{"n": 1}']
FIRST_CHARS = {"llama3": '{"name":', "pythonic": "[get_weather("}  # by which a call without a marker is recognised


@pytest.mark.parametrize("style", [s for s in TOOL_STYLES.values() if not s.uses_channels], ids=lambda s: s.name)
@pytest.mark.parametrize("size", [0, 1])
def test_cut_off_call_leaves_no_text(style: ToolStyle, size: int) -> None:
    """Exceptions: a beginning of a marker shorter than MIN_MARKER_CHARS, and the start of a call without a marker."""
    calls = style.format_calls([("get_weather", '{"city": "Paris"}'), ("f", '{"n": 1}')])
    for end in range(len(FIRST_CHARS.get(style.name, "x" * MIN_MARKER_CHARS)), len(calls) + 1):
        parser = make_parser(style)
        pieces = [p for at in range(0, end, size or end) for p in parser.push(calls[at : min(end, at + (size or end))])]
        pieces = merge_adjacent_deltas([*pieces, *parser.flush(was_cut_off=True)])
        assert not [p for p in pieces if isinstance(p, TextDelta)], (calls[:end], pieces)
        names = [p.name for p in pieces if isinstance(p, ToolCallStart)]
        assert names == ["get_weather", "f"][: len(names)], "a call is repeated"
        arguments = [p.text for p in pieces if isinstance(p, ToolCallArguments)]
        assert all(whole.startswith(part) for whole, part in zip(WHOLE_ARGUMENTS, arguments, strict=False))
    assert names == ["get_weather", "f"]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, "if a <"),
        (HERMES, '{"name": "Ada", "age": 3'),
        (LLAMA3, '{"answer": 4'),
        (LLAMA3, '{"name": "Ada", "age"'),
        (MISTRAL, "a list: ["),
    ],
)
def test_cut_off_text_is_kept(style: ToolStyle, text: str) -> None:
    parser = make_parser(style)
    assert merge_adjacent_deltas([*parser.push(text), *parser.flush(was_cut_off=True)]) == [TextDelta(text)]


def test_call_head_ended_by_model_is_text() -> None:
    assert split('<tool_call>{"name": "f"', make_parser(HERMES)) == [("text", '<tool_call>{"name": "f"')]
