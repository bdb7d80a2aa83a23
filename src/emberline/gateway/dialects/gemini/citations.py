"""Citations in Gemini's replies: text segments, with offsets in UTF-8 bytes, and their sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from emberline.gateway.dialects.canonical import Json, Part, TextContent
from emberline.gateway.dialects.citations import read_string_field
from emberline.wire.deltas import Citation


class GroundingCollector:
    """Collects the grounding metadata (sources, cited segments) of one candidate from a stream's events."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._supports: list[Any] = []
        self._citation_rows: list[Any] = []
        self._other_metadata: Json = {}

    def add(self, grounding: object, citation_metadata: object) -> None:
        """Add the values of `groundingMetadata` and `citationMetadata`."""
        if isinstance(grounding, dict):
            fields = {f"groundingMetadata.{name}": value for name, value in grounding.items()}
            chunks = _as_list(fields.pop("groundingMetadata.groundingChunks", None))
            repeats_all = chunks[: len(self._chunks)] == self._chunks  # the event repeats all earlier chunks
            self._chunks = chunks if repeats_all else self._chunks + chunks
            self._supports += _as_list(fields.pop("groundingMetadata.groundingSupports", None))
            self._other_metadata |= fields
        if isinstance(citation_metadata, dict):  # Vertex AI calls the rows `citations`
            self._citation_rows += _as_list(
                citation_metadata.get("citationSources") or citation_metadata.get("citations")
            )

    def build_citations(self, parts: Sequence[Part]) -> list[Citation]:
        """Return the citations, with character offsets in the joined text of `parts`."""
        texts = [part.text.encode() if isinstance(part, TextContent) else b"" for part in parts]
        whole_text = b"".join(texts)
        result = []
        for segment, source in self._iter_cited_segments():
            part = _read_index(segment, "partIndex")
            begin = sum(map(len, texts[:part])) if part < len(texts) else 0  # a stream's text is passed as one part
            start, end = [
                _count_characters(whole_text, begin + _read_index(segment, name)) for name in ("startIndex", "endIndex")
            ]
            quote = read_string_field(source, "text")
            result.append(Citation(source["uri"], read_string_field(source, "title"), quote, start, max(start, end)))
        return list(dict.fromkeys(result))

    def unused_metadata(self) -> Json:
        """Return the metadata that no citation uses."""
        used = [source for _, source in self._iter_cited_segments()]
        unused_chunks = [chunk for index, chunk in enumerate(self._chunks) if self._find_source(index) not in used]
        unused_rows = [row for row in self._citation_rows if row not in used]
        return self._other_metadata | {
            "groundingMetadata.groundingChunks": unused_chunks,
            "citationMetadata": unused_rows,
        }

    def _iter_cited_segments(self) -> Iterator[tuple[Json, Json]]:
        for support in self._supports:
            match support:
                case {"segment": dict(segment), "groundingChunkIndices": list(indices)}:
                    yield from (
                        (segment, source) for index in indices if (source := self._find_source(index)) is not None
                    )
        yield from (
            (row, row) for row in self._citation_rows if isinstance(row, dict) and read_string_field(row, "uri")
        )

    def _find_source(self, index: object) -> Json | None:
        match self._chunks[index] if isinstance(index, int) and 0 <= index < len(self._chunks) else None:
            case {"web": dict(source)} | {"retrievedContext": dict(source)} | {"maps": dict(source)}:
                return source if read_string_field(source, "uri") else None
        return None


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_index(data: Json, name: str) -> int:
    value = data.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _count_characters(text: bytes, num_bytes: int) -> int:
    return len(text[:num_bytes].decode(errors="ignore"))


def render_grounding(texts: Iterable[tuple[int, TextContent]]) -> Json:
    """Return the groundingMetadata for the citations of `texts`, which are (part index, text) pairs.

    Return {} if the texts have no citations.
    """
    chunks: dict[tuple[str, str], int] = {}
    supports: dict[tuple[int, int, int], Json] = {}
    for part, text in texts:
        for citation in text.citations:
            start, end = [len(text.text[:index].encode()) for index in (citation.start, citation.end)]
            cited_text = text.text[citation.start : citation.end]
            segment = {"partIndex": part, "startIndex": start, "endIndex": end, "text": cited_text}
            support = supports.setdefault((part, start, end), {"segment": segment, "groundingChunkIndices": []})
            chunk = chunks.setdefault((citation.url, citation.title), len(chunks))
            if chunk not in support["groundingChunkIndices"]:
                support["groundingChunkIndices"].append(chunk)
    if not chunks:
        return {}
    pages = [{"web": {"uri": url, "title": title}} for url, title in chunks]
    return {"groundingMetadata": {"groundingChunks": pages, "groundingSupports": list(supports.values())}}
