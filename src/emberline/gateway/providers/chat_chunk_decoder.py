"""The base class of decoders that convert a provider's stream events to chunks of OpenAI's chat API."""

from __future__ import annotations

from typing import Any

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.logs.request_ids import parse_created_seconds
from emberline.gateway.upstream.reply_decoder import ReplyDecoder
from emberline.wire import sse
from emberline.wire.event_splitter import EventSplitter, parse_event

Json = dict[str, Any]


class ChatChunkDecoder(ReplyDecoder):
    def __init__(self, model: str, id: str) -> None:
        self._names = {"id": f"chatcmpl-{id}", "created": parse_created_seconds(id), "model": model}
        self._splitter = EventSplitter(UpstreamBroken)

    def push(self, data: bytes) -> bytes:
        return b"".join(self.decode_event(*parse_event(event)) for event in self._splitter.push(data))

    def end(self) -> bytes:
        if self._splitter.partial_event.strip():
            raise UpstreamBroken("the provider's stream ended in the middle of an event")
        return b""

    def decode_event(self, name: bytes, payload: bytes) -> bytes:
        """Return the chat chunks for one complete event of the provider's stream."""
        raise NotImplementedError

    def render_reply(self, choice: Json, extra_fields: Json) -> bytes:
        return sse.dumps(
            {**self._names, "object": "chat.completion", "choices": [{"index": 0, **choice}], **extra_fields}
        )

    def render_delta(self, delta: Json, finish_reason: str | None = None) -> bytes:
        return self.render_chunk([{"index": 0, "delta": delta, "finish_reason": finish_reason}])

    def render_chunk(self, choices: list[Json], **extra_fields: Any) -> bytes:
        return sse.encode_data_event(
            {**self._names, "object": "chat.completion.chunk", "choices": choices, **extra_fields}
        )


def render_error_event(text: str) -> bytes:
    return sse.encode_data_event(
        {"error": {"message": text or "the provider sent no error message", "type": "server_error"}}
    )
