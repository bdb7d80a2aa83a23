"""Citations in Anthropic's Messages: each refers to a whole text block."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from emberline.gateway.dialects.canonical import Part, TextContent
from emberline.gateway.dialects.citations import extract_citations, read_string_field
from emberline.wire.deltas import Citation


def parse_citation(raw: object, start: int, end: int) -> Citation | None:
    """Parse a citation for characters `start` to `end` of the text. Return None if it has no URL."""
    match raw:
        case {"type": "web_search_result_location", "url": str(url), **data}:
            pass
        case {"type": "search_result_location", "source": str(url), **data} if "://" in url:
            pass
        case _:
            return None
    title, quote, encrypted_index = [
        read_string_field(data, name) for name in ("title", "cited_text", "encrypted_index")
    ]
    return Citation(url, title, quote, start, end, encrypted_index)


def extract_citations_from_parts(parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, TextContent):
            parse_part_citation = partial(parse_citation, start=0, end=len(part.text))
            part.citations += extract_citations(part.extra, "citations", parse_part_citation)
