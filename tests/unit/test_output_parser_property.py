"""The result of OutputParser does not depend on where the output is cut, for random documents."""

from __future__ import annotations

import json
from itertools import count, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api.call import Tool
from emberline.api.output_parser import Piece, merge_adjacent_deltas
from emberline.api.parser_choice import make_output_parser
from emberline.api.reasoning import HARMONY_ANALYSIS, REASONING_STYLES, ReasoningStyle
from emberline.api.tool_styles.registry import TOOL_STYLES
from emberline.api.tool_styles.style import ToolStyle
from emberline.wire.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

STYLES = list(TOOL_STYLES.values())
REASONINGS = list(REASONING_STYLES.values())
MARKERS = sorted({m for style in (*STYLES, *REASONINGS) for m in style.markers})
# Parameters whose text is passed on as it comes, and others that are converted when they are complete.
PARAMETERS = {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "中": {"type": "string"}}}
TOOLS = [Tool("f", "", PARAMETERS), Tool("get_weather"), Tool("a.b-c")]

NAMES = ["f", "get_weather", "a.b-c", "", '\u00e9"\n']
ARGUMENTS = [{}, {"a": 1}, {"s": '}"{\\ </tool_call>', "n": [{"m": {}}, None]}, {"中": "👍\n"}, {"k": '\\"'}]
CALLS = [
    *(
        style.format_calls([(name, json.dumps(args))])
        for style in TOOL_STYLES.values()
        for name in NAMES
        for args in ARGUMENTS
    ),
    *(json.dumps({"id": 1, "arguments": args, "name": name}) for name in NAMES for args in ARGUMENTS),
]
SCRAPS = [
    '{"name": "f", "arguments": ',
    '{"name": "f"',
    '"x": tru',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "\n",
    " ",
    "; ",
    ", ",
    "é",
]

styles = st.sampled_from([None, *STYLES])
reasonings = st.sampled_from([None, *REASONINGS])
cuts = st.lists(st.integers(0, 500), max_size=6)
lengths = st.sampled_from([999, 999, 999, 1, 3, 9, 20])  # a part may be truncated: incomplete markers and calls
parts = st.builds(lambda text, n: text[:n], st.sampled_from(MARKERS) | st.sampled_from(CALLS), lengths)
documents = st.lists(parts | st.sampled_from(SCRAPS) | st.text(max_size=4), max_size=6).map("".join)


def pieces_of(
    chunks: list[str], style: ToolStyle | None, reasoning: ReasoningStyle | None, inside: bool
) -> list[Piece]:
    ids = count()
    parser = make_output_parser(0, lambda: f"{next(ids):024d}", style, reasoning, inside, TOOLS)
    if parser is None:
        return [TextDelta(text)] if (text := "".join(chunks)) else []
    return merge_adjacent_deltas([*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.flush()])


def split_at(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=400, deadline=None)
@given(documents, cuts, styles, reasonings, st.booleans())
def test_result_does_not_depend_on_cuts(
    text: str, cuts: list[int], style: ToolStyle | None, reasoning: ReasoningStyle | None, inside: bool
) -> None:
    if reasoning is not None and not inside:
        text = reasoning.begin + text
    whole = pieces_of([text], style, reasoning, inside)
    assert pieces_of(split_at(text, cuts), style, reasoning, inside) == whole
    assert pieces_of(list(text), style, reasoning, inside) == whole


@settings(max_examples=200, deadline=None)
@given(documents, styles, reasonings)
def test_starts_precede_arguments_and_text_is_preserved(
    text: str, style: ToolStyle | None, reasoning: ReasoningStyle | None
) -> None:
    left, slot = iter(text), -1
    for piece in pieces_of(list(text), style, reasoning, inside=False):
        match piece:
            case ToolCallStart():
                slot += 1
                assert piece.slot == slot and piece.name
            case ToolCallArguments():
                assert piece.slot == slot
            case TextDelta() | ReasoningDelta():
                assert all(char in left for char in piece.text), "the text is no subsequence of the input"


calls = st.lists(st.tuples(st.sampled_from(NAMES[:3]), st.sampled_from(ARGUMENTS)), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["", "Well: ", "é {} \n"]), calls, st.sampled_from(STYLES))
def test_formatted_calls_are_parsed_back(text: str, calls: list[tuple[str, Any]], style: ToolStyle) -> None:
    calls = calls if style.allows_several_calls else calls[:1]
    lead = "" if style.markerless_starts or style.uses_channels else text
    document = lead + style.format_calls([(name, json.dumps(args)) for name, args in calls])
    reasoning = HARMONY_ANALYSIS if style.uses_channels else None
    pieces = pieces_of([document], style, reasoning, inside=False)
    assert [p.name for p in pieces if isinstance(p, ToolCallStart)] == [name for name, _ in calls]
    assert [json.loads(p.text) for p in pieces if isinstance(p, ToolCallArguments)] == [args for _, args in calls]
    assert "".join(p.text for p in pieces if isinstance(p, TextDelta)) == lead
