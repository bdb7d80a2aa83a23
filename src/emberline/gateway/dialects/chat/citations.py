"""Citations in Chat Completions: annotations of a message, with character offsets in its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from emberline.gateway.dialects.citations import lifted, spread, text_of
from emberline.gateway.dialects.inner import Citation, Json, Message, Part, Text


def parse(raw: object) -> Citation | None:
    match raw:
        case {"type": "url_citation", "url_citation": dict(data)}:
            return page(data)
    return None


def page(data: Mapping[Any, Any]) -> Citation | None:
    """Parse the fields that Chat Completions and Responses share; `content` is OpenRouter's addition."""
    url, start, end = data.get("url"), data.get("start_index"), data.get("end_index")
    if not isinstance(url, str):
        return None
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        start = end = 0
    return Citation(url, text_of(data, "title"), text_of(data, "content"), start, end)


def lift(message: Message) -> None:
    spread(message.parts, lifted(message.extra, "annotations", parse))


def told(citation: Citation) -> Json:
    segment = {"start_index": citation.start, "end_index": citation.end}
    return {**segment, "url": citation.url, "title": citation.title}


def render(citation: Citation) -> Json:
    return {"type": "url_citation", "url_citation": told(citation)}


def render_all(parts: Iterable[Part]) -> list[Json]:
    """Return the annotations of all text parts, with offsets in the joined text."""
    result: list[Json] = []
    begin = 0
    for part in parts:
        if isinstance(part, Text):
            result += [render(citation.moved(begin)) for citation in part.citations]
            begin += len(part.text)
    return result
