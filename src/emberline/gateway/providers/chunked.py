"""The base class of decoders that turn a provider's own events into chunks of OpenAI's chat."""

from __future__ import annotations

from typing import Any

from emberline.api import sse
from emberline.gateway.errors import Broken
from emberline.gateway.logs.ids import born
from emberline.gateway.streams.splitter import Splitter, payload_of
from emberline.gateway.upstream.decoder import Decoder

Json = dict[str, Any]


class Chunked(Decoder):
    def __init__(self, model: str, id: str) -> None:
        self._names = {"id": f"chatcmpl-{id}", "created": born(id), "model": model}
        self._splitter = Splitter()

    def push(self, data: bytes) -> bytes:
        return b"".join(self.event(*payload_of(event)) for event in self._splitter.push(data))

    def end(self) -> bytes:
        if self._splitter.rest.strip():
            raise Broken("the provider's stream ended within an event")
        return b""

    def event(self, name: bytes, payload: bytes) -> bytes:
        """Return the chunks for one complete event of the provider."""
        raise NotImplementedError

    def reply(self, choice: Json, more: Json) -> bytes:
        return sse.dumps({**self._names, "object": "chat.completion", "choices": [{"index": 0, **choice}], **more})

    def chunk(self, delta: Json, reason: str | None = None) -> bytes:
        return self.chunks([{"index": 0, "delta": delta, "finish_reason": reason}])

    def chunks(self, choices: list[Json], **more: Any) -> bytes:
        return sse.data({**self._names, "object": "chat.completion.chunk", "choices": choices, **more})


def failed(text: str) -> bytes:
    return sse.data({"error": {"message": text or "the provider sent no error message", "type": "server_error"}})
