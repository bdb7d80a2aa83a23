"""TextEmbedder: turns texts into vectors.

It uses any server with OpenAI's embeddings API, such as Emberline."""

from __future__ import annotations

from typing import Protocol

import msgspec

from emberline.gateway.errors import UpstreamFailed
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.gateway.upstream.upstream import Upstream
from emberline.net.notjson import NOT_JSON

LARGEST = 4 << 20


class Embedder(Protocol):
    async def embed(self, texts: list[str]) -> list[list[float]] | None:
        """Return a vector for each text, or None on an error or timeout."""
        ...


class _Row(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Row]


class HttpEmbedder:
    def __init__(self, upstream: Upstream, url: str, model: str, *, patience: float = 0.5) -> None:
        """`url` is the server's address without a path; `timeout_s` applies to each request."""
        self._upstream, self._url, self._model, self._patience = upstream, url.rstrip("/"), model, patience
        self.failures = 0

    async def embed(self, texts: list[str]) -> list[list[float]] | None:
        body = msgspec.json.encode({"model": self._model, "input": texts, "encoding_format": "float"})
        headers = {"content-type": "application/json"}
        try:
            incoming = await self._upstream.send(
                Outgoing("POST", f"{self._url}/v1/embeddings", headers, body), self._patience
            )
            try:
                data = await incoming.whole(self._patience, LARGEST)
            finally:
                incoming.close()
            rows = msgspec.json.decode(data, type=_Answer).data if incoming.status == 200 else []
        except (UpstreamFailed, *NOT_JSON):
            rows = []
        if len(rows) != len(texts):
            self.failures += 1
            return None
        return [row.embedding for row in sorted(rows, key=lambda row: row.index)]
