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
    """Converts one reply to a supported wire format.

    Methods raise UpstreamBroken for data that is not a valid reply.
    """

    stream_content_type: ClassVar[str] = EVENT_STREAM  # content type of the provider's streams

    def decode_body(self, body: bytes) -> bytes:
        return body

    def push(self, data: bytes) -> bytes:
        """Take the next bytes of the provider's stream.

        Return the events that are now complete, in the supported wire format.
        """
        return data

    def end(self) -> bytes:
        """Return the remaining events in the supported wire format when the provider's stream has ended."""
        return b""


class DecodedReply(HTTPClientResponse):
    """A response whose body a ReplyDecoder converts while it is read."""

    __slots__ = ("_decoder", "_ended", "_response")

    def __init__(self, response: HTTPClientResponse, decoder: ReplyDecoder) -> None:
        self._response = response
        self._decoder = decoder
        self._ended = False
        self.status = 200  # Replicate answers 201, which clients of OpenAI's chat do not expect
        self.headers, self.content_type = response.headers, response.content_type
        if response.content_type == decoder.stream_content_type:
            self.content_type = EVENT_STREAM
            self.headers = {**response.headers, "content-type": EVENT_STREAM}

    async def read(self, timeout_s: float = NO_TIMEOUT_S) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._ended:
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise UpstreamTimeout(f"the provider sent no complete event for {timeout_s:.3g} s")
            data = await self._response.read(remaining)
            self._ended = not data
            if output := self._decoder.push(data) if data else self._decoder.end():
                return output
        return b""

    async def read_all(self, timeout_s: float = NO_TIMEOUT_S, max_bytes: int = sys.maxsize) -> bytes:
        body = await self._response.read_all(timeout_s, max_bytes)
        return await offload.run_inline_if_small(len(body), self._decoder.decode_body, body)

    def close(self) -> None:
        self._response.close()


class BufferedReply(HTTPClientResponse):
    """A response whose body has already been read."""

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


def decode_json_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object of a provider's reply. Raise UpstreamBroken if the data is not a JSON object."""
    try:
        value = msgspec.json.decode(data)
    except JSON_DECODE_ERRORS as e:
        raise UpstreamBroken(f"the provider sent invalid JSON: {e}") from e
    if not isinstance(value, dict):
        raise UpstreamBroken("the provider sent JSON that is not an object")
    return value
