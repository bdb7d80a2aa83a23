"""Parses lists of citations and assigns citations to the texts that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from emberline.gateway.dialects.canonical import Json, Part, TextContent
from emberline.wire.deltas import Citation


def parse_citations(rows: object, parse: Callable[[object], Citation | None]) -> list[Citation]:
    """Return the citations that `parse` reads from the rows.

    Malformed rows are skipped, because a citation is no reason to fail a reply.
    """
    return [citation for row in rows if (citation := parse(row)) is not None] if isinstance(rows, list) else []


def extract_citations(extra: Json, name: str, parse: Callable[[object], Citation | None]) -> list[Citation]:
    """Return the citations in the list `extra[name]`, and remove them from that list."""
    citations = parse_citations(extra.get(name), parse)
    if citations:
        extra[name] = [row for row in extra[name] if parse(row) is None]
    return citations


def read_string_field(data: Mapping[Any, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def assign_citations(parts: Iterable[Part], citations: list[Citation]) -> None:
    """Add each citation to the text parts that it overlaps.

    The offsets in `citations` refer to the joined text of all parts.
    """
    texts = [part for part in parts if isinstance(part, TextContent)]
    last = sum(len(text.text) for text in texts) - 1
    begin = 0
    for text in texts:
        end = begin + len(text.text)
        for citation in citations:
            start = min(citation.start, last)
            if start < end and begin < max(citation.end, start + 1):
                start, stop = max(start - begin, 0), min(citation.end, end) - begin
                text.citations.append(msgspec.structs.replace(citation, start=start, end=stop))
        begin = end


def split_at_citations(text: TextContent) -> list[tuple[str, list[Citation]]]:
    """Split the text where citations start and end, and return each section with its citations.

    No section consists of only white space, unless the whole text does.
    """
    content, cuts = text.text, [0]
    for edge in sorted(
        {len(content), *(position for citation in text.citations for position in (citation.start, citation.end))}
    ):
        if content[cuts[-1] : edge].strip():
            cuts.append(edge)
    cuts[max(1, len(cuts) - 1) :] = [len(content)]
    return [
        (content[a:b], [c for c in text.citations if c.start < b and a < max(c.end, c.start + 1)])
        for a, b in pairwise(cuts)
    ]
