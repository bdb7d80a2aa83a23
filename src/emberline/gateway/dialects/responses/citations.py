"""Citations in Responses: annotations of a text part, with character offsets in it."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.gateway.dialects.chat.citations import page, told
from emberline.gateway.dialects.citations import lifted, spread
from emberline.gateway.dialects.inner import Citation, Json, Part, Text


def parse(raw: object) -> Citation | None:
    match raw:
        case {"type": "url_citation", **data}:
            return page(data)
    return None


def lift(parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, Text):
            spread([part], lifted(part.extra, "annotations", parse))


def render(citation: Citation) -> Json:
    return {"type": "url_citation", **told(citation)}
