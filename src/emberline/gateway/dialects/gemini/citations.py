"""The citations of Gemini's candidates: places in the text, in bytes of UTF-8, and the sources they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from emberline.gateway.dialects.citations import text_of
from emberline.gateway.dialects.inner import Citation, Json, Part, Text


class Grounding:
    """What one candidate tells of its sources, in one event or several: indices of chunks are of all of them."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._supports: list[Any] = []
        self._recited: list[Any] = []
        self._left: Json = {}

    def add(self, grounding: object, recited: object) -> None:
        """`groundingMetadata` and `citationMetadata`."""
        if isinstance(grounding, dict):
            told = {f"groundingMetadata.{name}": value for name, value in grounding.items()}
            chunks = _rows(told.pop("groundingMetadata.groundingChunks", None))
            anew = chunks[: len(self._chunks)] == self._chunks  # with all that was told before
            self._chunks = chunks if anew else self._chunks + chunks
            self._supports += _rows(told.pop("groundingMetadata.groundingSupports", None))
            self._left |= told
        if isinstance(recited, dict):  # whose rows are called otherwise by Vertex
            self._recited += _rows(recited.get("citationSources") or recited.get("citations"))

    def citations(self, parts: Sequence[Part]) -> list[Citation]:
        """Of the whole text of these parts."""
        texts = [part.text.encode() if isinstance(part, Text) else b"" for part in parts]
        whole = b"".join(texts)
        made = []
        for place, source in self._places():
            part = _index(place, "partIndex")
            begin = sum(map(len, texts[:part])) if part < len(texts) else 0  # a stream is one part here
            start, end = [_characters(whole, begin + _index(place, name)) for name in ("startIndex", "endIndex")]
            quote = text_of(source, "text")
            made.append(Citation(source["uri"], text_of(source, "title"), quote, start, max(start, end)))
        return list(dict.fromkeys(made))

    def left(self) -> Json:
        """What is in no citation."""
        used = [source for _, source in self._places()]
        idle = [chunk for at, chunk in enumerate(self._chunks) if self._source(at) not in used]
        nameless = [row for row in self._recited if row not in used]
        return self._left | {"groundingMetadata.groundingChunks": idle, "citationMetadata": nameless}

    def _places(self) -> Iterator[tuple[Json, Json]]:
        for support in self._supports:
            match support:
                case {"segment": dict(segment), "groundingChunkIndices": list(indices)}:
                    yield from ((segment, source) for at in indices if (source := self._source(at)) is not None)
        yield from ((row, row) for row in self._recited if isinstance(row, dict) and text_of(row, "uri"))

    def _source(self, at: object) -> Json | None:
        match self._chunks[at] if isinstance(at, int) and 0 <= at < len(self._chunks) else None:
            case {"web": dict(source)} | {"retrievedContext": dict(source)} | {"maps": dict(source)}:
                return source if text_of(source, "uri") else None
        return None


def _rows(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _index(said: Json, name: str) -> int:
    value = said.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _characters(text: bytes, count: int) -> int:
    return len(text[:count].decode(errors="ignore"))


def render(texts: Iterable[tuple[int, Text]]) -> Json:
    """Of texts and which parts they are: the field of the candidate, if any of them cites."""
    chunks: dict[tuple[str, str], int] = {}
    supports: dict[tuple[int, int, int], Json] = {}
    for part, text in texts:
        for cited in text.citations:
            start, end = [len(text.text[:at].encode()) for at in (cited.start, cited.end)]
            words = text.text[cited.start : cited.end]
            segment = {"partIndex": part, "startIndex": start, "endIndex": end, "text": words}
            support = supports.setdefault((part, start, end), {"segment": segment, "groundingChunkIndices": []})
            chunk = chunks.setdefault((cited.url, cited.title), len(chunks))
            if chunk not in support["groundingChunkIndices"]:
                support["groundingChunkIndices"].append(chunk)
    if not chunks:
        return {}
    pages = [{"web": {"uri": url, "title": title}} for url, title in chunks]
    return {"groundingMetadata": {"groundingChunks": pages, "groundingSupports": list(supports.values())}}
