"""The citations of Anthropic's messages: each is of a whole block of text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from emberline.gateway.dialects.citations import lifted, text_of
from emberline.gateway.dialects.inner import Citation, Json, Part, Text


def parse(raw: object, start: int, end: int) -> Citation | None:
    """Of the block from `start` to `end`. Results of a client's own search may be no pages."""
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
    """What others do not tell of a page is empty."""
    fields = {"url": citation.url, "title": citation.title or None, "cited_text": citation.quote}
    return {"type": "web_search_result_location", **fields, "encrypted_index": citation.seal}
