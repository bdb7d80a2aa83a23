"""Citations in Chat Completions: annotations of a message, with character offsets in its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emberline.gateway.dialects.canonical import CanonicalMessage
from emberline.gateway.dialects.citations import assign_citations, extract_citations, read_string_field
from emberline.wire.deltas import Citation


def parse_citation(raw: object) -> Citation | None:
    match raw:
        case {"type": "url_citation", "url_citation": dict(data)}:
            return parse_url_citation(data)
    return None


def parse_url_citation(data: Mapping[Any, Any]) -> Citation | None:
    """Parse the citation fields that Chat Completions and Responses share, and OpenRouter's `content`."""
    url, start, end = data.get("url"), data.get("start_index"), data.get("end_index")
    if not isinstance(url, str):
        return None
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        start = end = 0
    return Citation(url, read_string_field(data, "title"), read_string_field(data, "content"), start, end)


def extract_citations_from_message(message: CanonicalMessage) -> None:
    assign_citations(message.parts, extract_citations(message.extra, "annotations", parse_citation))
