"""Citations in Responses: annotations of a text part, with character offsets in the part's text."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.gateway.dialects.canonical import Part, TextContent
from emberline.gateway.dialects.chat.citations import parse_url_citation
from emberline.gateway.dialects.citations import assign_citations, extract_citations
from emberline.wire.deltas import Citation


def parse_citation(raw: object) -> Citation | None:
    match raw:
        case {"type": "url_citation", **data}:
            return parse_url_citation(data)
    return None


def extract_citations_from_parts(parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, TextContent):
            assign_citations([part], extract_citations(part.extra, "annotations", parse_citation))
