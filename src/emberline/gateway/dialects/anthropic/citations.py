"""Citations in Anthropic's Messages: each refers to a whole text block."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from emberline.gateway.dialects.citations import lifted, text_of
from emberline.gateway.dialects.inner import Citation, Json, Part, Text


def parse(raw: object, start: int, end: int) -> Citation | None:
    """Parse a citation of the text from `start` to `end`; None if it does not refer to a URL."""
    match raw:
        case {"type": "web_search_result_location", "url": str(url), **data}:
            pass
        case {"type": "search_result_location", "source": str(url), **data} if "://" in url:
            pass
        case _:
            return None
    title, quote, encrypted_index = [text_of(data, name) for name in ("title", "cited_text", "encrypted_index")]
    return Citation(url, title, quote, start, end, encrypted_index)


def lift(parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, Text):
            whole_text = partial(parse, start=0, end=len(part.text))
            part.citations += lifted(part.extra, "citations", whole_text)


def render(citation: Citation) -> Json:
    """Render a citation; fields that other providers do not send are empty."""
    fields = {"url": citation.url, "title": citation.title or None, "cited_text": citation.quote}
    return {"type": "web_search_result_location", **fields, "encrypted_index": citation.seal}
