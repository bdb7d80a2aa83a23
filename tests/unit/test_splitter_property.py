"""Where the output is cut must not matter: any document, cut anywhere, folds into the same pieces as uncut."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from test_splitter import splitter

from emberline.api.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from emberline.api.reasoning import MAGISTRAL, THINK, ReasoningStyle
from emberline.api.splitter import Piece, fold
from emberline.api.tools import written
from emberline.api.toolstyle import STYLES, ToolStyle

MARKERS = sorted({m for style in STYLES.values() for m in style.markers} | {*THINK.markers, *MAGISTRAL.markers})

styles = st.sampled_from([None, *STYLES.values()])
reasonings = st.sampled_from([None, THINK, MAGISTRAL])
words = st.text(
    st.sampled_from(list('ab {}[]",:;\\/<>|_\n é中👍')) | st.characters(exclude_categories=["Cs"]), max_size=12
)
names = st.sampled_from(["f", "get_weather", "a.b-c"]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
arguments = st.dictionaries(
    words,
    st.recursive(words | st.integers() | st.none(), lambda s: st.lists(s) | st.dictionaries(words, s), max_leaves=4),
    max_size=3,
)
calls = st.builds(
    lambda style, name, args: written([(name, json.dumps(args))], style),
    st.sampled_from(list(STYLES.values())),
    names,
    arguments,
)
objects = st.builds(
    lambda name, args, extra: json.dumps({**extra, "name": name, "arguments": args}), names, arguments, arguments
)
nearly = st.builds(lambda marker, n: marker[:n], st.sampled_from(MARKERS), st.integers(1, 14))
fragments = (
    words
    | st.sampled_from(MARKERS)
    | nearly
    | calls
    | objects
    | st.sampled_from(["{", '{"name": "f", "arguments": ', "}", "\n", "; ", ", ", "]"])
)
documents = st.builds(
    lambda parts, cut: "".join(parts)[: -cut or None], st.lists(fragments, max_size=8), st.integers(0, 6)
)


def pieces_of(
    chunks: list[str], style: ToolStyle | None, reasoning: ReasoningStyle | None, inside: bool
) -> list[Piece]:
    one = splitter(style, reasoning, inside)
    return fold([*(piece for chunk in chunks for piece in one.push(chunk)), *one.flush()])


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=2000, deadline=None)
@given(documents, st.lists(st.integers(0, 1000), max_size=12), styles, reasonings, st.booleans())
def test_cuts_do_not_matter(
    text: str, cuts: list[int], style: ToolStyle | None, reasoning: ReasoningStyle | None, inside: bool
) -> None:
    whole = pieces_of([text], style, reasoning, inside)
    assert pieces_of(chunked(text, cuts), style, reasoning, inside) == whole
    assert pieces_of(list(text), style, reasoning, inside) == whole


@settings(max_examples=1000, deadline=None)
@given(documents, styles, reasonings)
def test_nothing_is_invented_and_starts_come_before_arguments(
    text: str, style: ToolStyle | None, reasoning: ReasoningStyle | None
) -> None:
    at, slot = 0, -1
    for piece in pieces_of(list(text), style, reasoning, inside=False):
        match piece:
            case ToolCallStart():
                slot += 1
                assert piece.slot == slot and piece.name
            case ToolCallArguments():
                assert piece.slot == slot
            case TextDelta() | ReasoningDelta():  # a part of the input, in order
                at = text.index(piece.text, at) + len(piece.text)


@settings(max_examples=500, deadline=None)
@given(
    words.filter(lambda t: not t.lstrip().startswith(("{", "[", "<"))),
    st.lists(st.tuples(names.filter(str.isidentifier), arguments), min_size=1, max_size=3),
    st.sampled_from(list(STYLES.values())),
)
def test_what_a_style_writes_is_read_back(
    text: str, said: list[tuple[str, dict[str, object]]], style: ToolStyle
) -> None:
    said = [(name, args) for name, args in said if name.isascii()] or [("f", {})]
    lead = "" if style.bare else text
    document = lead + written([(name, json.dumps(args)) for name, args in said], style)
    pieces = pieces_of([document], style, None, inside=False)
    assert [p.name for p in pieces if isinstance(p, ToolCallStart)] == [name for name, _ in said]
    assert [json.loads(p.text) for p in pieces if isinstance(p, ToolCallArguments)] == [args for _, args in said]
    assert "".join(p.text for p in pieces if isinstance(p, TextDelta)) == (lead if lead.strip() else "")
