"""Converts a provider's own reply format into a supported wire format while it is read."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar

import msgspec

from emberline.core.offload import offload
from emberline.gateway.core.errors import UpstreamBroken, UpstreamTimeout
from emberline.net.client_connection import NO_TIMEOUT_S
from emberline.net.client_response import HTTPClientResponse
from emberline.net.json_errors import JSON_DECODE_ERRORS

EVENT_STREAM = "text/event-stream"


class ReplyDecoder:
    """Decodes one reply; raises UpstreamBroken for anything that is not a reply of the provider."""

    stream_content_type: ClassVar[str] = EVENT_STREAM  # content type of the provider's streams

    def decode_body(self, body: bytes) -> bytes:
        return body

    def push(self, data: bytes) -> bytes:
        """Return the events of the wire format that are complete with these bytes of the provider's stream."""
        return data

    def end(self) -> bytes:
        """Return the remaining events when the provider's stream has ended."""
        return b""


class DecodedReply(HTTPClientResponse):
    """A reply that is read through a decoder."""

    __slots__ = ("_decoder", "_ended", "_incoming")

    def __init__(self, incoming: HTTPClientResponse, decoder: ReplyDecoder) -> None:
        self._incoming = incoming
        self._decoder = decoder
        self._ended = False
        self.status = 200  # Replicate answers 201, which clients of OpenAI's chat do not expect
        self.headers, self.content_type = incoming.headers, incoming.content_type
        if incoming.content_type == decoder.stream_content_type:
            self.content_type = EVENT_STREAM
            self.headers = {**incoming.headers, "content-type": EVENT_STREAM}

    async def read(self, timeout_s: float = NO_TIMEOUT_S) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._ended:
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise UpstreamTimeout(f"the provider sent no complete event for {timeout_s:.3g} s within a reply")
            data = await self._incoming.read(remaining)
            self._ended = not data
            if output := self._decoder.push(data) if data else self._decoder.end():
                return output
        return b""

    async def read_all(self, timeout_s: float = NO_TIMEOUT_S, max_bytes: int = sys.maxsize) -> bytes:
        body = await self._incoming.read_all(timeout_s, max_bytes)
        return await offload.run_by_size(len(body), self._decoder.decode_body, body)

    def close(self) -> None:
        self._incoming.close()


class BufferedReply(HTTPClientResponse):
    """A reply whose body has already been read."""

    __slots__ = ("body",)

    def __init__(
        self, status: int, headers: dict[str, str], body: bytes, content_type: str = "application/json"
    ) -> None:
        self.status, self.headers, self.content_type, self.body = status, headers, content_type, body

    async def read(self, timeout_s: float = NO_TIMEOUT_S) -> bytes:
        body, self.body = self.body, b""
        return body

    async def read_all(self, timeout_s: float = NO_TIMEOUT_S, max_bytes: int = sys.maxsize) -> bytes:
        return await self.read(timeout_s)

    def close(self) -> None:
        pass


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object of a provider's reply; raise UpstreamBroken for anything else."""
    try:
        value = msgspec.json.decode(data)
    except JSON_DECODE_ERRORS as e:
        raise UpstreamBroken(f"the provider sent invalid JSON: {e}") from e
    if not isinstance(value, dict):
        raise UpstreamBroken("the provider sent JSON that is not an object")
    return value
