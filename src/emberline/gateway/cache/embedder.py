"""TextEmbedder: the interface for turning texts into vectors.

HttpEmbedder implements it with any server that has OpenAI's embeddings API, such as Emberline.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from emberline.gateway.core.errors import UpstreamFailed
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS

MAX_REPLY_BYTES = 4 << 20


class TextEmbedder(Protocol):
    async def embed(self, texts: list[str]) -> list[list[float]] | None:
        """Return a vector for each text, or None on an error or timeout."""
        ...


class _EmbeddingRow(msgspec.Struct):
    index: int
    embedding: list[float]


class _EmbeddingReply(msgspec.Struct):
    data: list[_EmbeddingRow]


class HttpEmbedder:
    def __init__(
        self, upstream: UpstreamClient, url: str, model: str, *, key: str | None = None, timeout_s: float = 0.5
    ) -> None:
        """Create an embedder for the server at `url`, which is an address without a path.

        `key`: the server's API key. `timeout_s` applies to each HTTP request.
        """
        self._upstream, self._url, self._model, self._timeout_s = upstream, url.rstrip("/"), model, timeout_s
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.failures = 0

    async def embed(self, texts: list[str]) -> list[list[float]] | None:
        body = msgspec.json.encode({"model": self._model, "input": texts, "encoding_format": "float"})
        try:
            incoming = await self._upstream.send(
                ProviderRequest("POST", f"{self._url}/v1/embeddings", self._headers, body), self._timeout_s
            )
            try:
                data = await incoming.read_all(self._timeout_s, MAX_REPLY_BYTES)
            finally:
                incoming.close()
            rows = msgspec.json.decode(data, type=_EmbeddingReply).data if incoming.status == 200 else []
        except (UpstreamFailed, *JSON_DECODE_ERRORS):
            rows = []
        if len(rows) != len(texts):
            self.failures += 1
            return None
        return [row.embedding for row in sorted(rows, key=lambda row: row.index)]
