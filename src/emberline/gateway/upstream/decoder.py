"""Converts a provider's own reply format into a supported wire format while it is read."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar

import msgspec

from emberline.core.offload import offload
from emberline.gateway.errors import Broken, TimedOut
from emberline.net.connection import FOREVER
from emberline.net.notjson import NOT_JSON
from emberline.net.reply import Reply as Incoming

EVENTS = "text/event-stream"


class Decoder:
    """Decodes one reply; raises Broken for anything that is not a reply of the provider."""

    streams: ClassVar[str] = EVENTS  # content type of the provider's streams

    def whole(self, body: bytes) -> bytes:
        return body

    def push(self, data: bytes) -> bytes:
        """Return the events of the wire format that are complete with these bytes of the provider's stream."""
        return data

    def end(self) -> bytes:
        """Return the remaining events when the provider's stream has ended."""
        return b""


class Decoded(Incoming):
    __slots__ = ("_decoder", "_ended", "_incoming")

    def __init__(self, incoming: Incoming, decoder: Decoder) -> None:
        self._incoming = incoming
        self._decoder = decoder
        self._ended = False
        self.status, self.headers, self.kind = 200, incoming.headers, incoming.kind  # Replicate answers 201
        if incoming.kind == decoder.streams:
            self.kind = EVENTS
            self.headers = {**incoming.headers, "content-type": EVENTS}

    async def read(self, seconds: float = FOREVER) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._ended:
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise TimedOut(f"the provider sent no complete event for {seconds:.3g} s within a reply")
            data = await self._incoming.read(remaining)
            self._ended = not data
            if output := self._decoder.push(data) if data else self._decoder.end():
                return output
        return b""

    async def whole(self, seconds: float = FOREVER, limit: int = sys.maxsize) -> bytes:
        body = await self._incoming.whole(seconds, limit)
        return await offload.run_by_size(len(body), self._decoder.whole, body)

    def close(self) -> None:
        self._incoming.close()


class Given(Incoming):
    """A reply whose body has already been read."""

    __slots__ = ("body",)

    def __init__(self, status: int, headers: dict[str, str], body: bytes, kind: str = "application/json") -> None:
        self.status, self.headers, self.kind, self.body = status, headers, kind, body

    async def read(self, seconds: float = FOREVER) -> bytes:
        body, self.body = self.body, b""
        return body

    async def whole(self, seconds: float = FOREVER, limit: int = sys.maxsize) -> bytes:
        return await self.read(seconds)

    def close(self) -> None:
        pass


def decoded_object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except NOT_JSON as e:
        raise Broken(f"the provider sent invalid JSON: {e}") from e
    if not isinstance(value, dict):
        raise Broken("the provider sent JSON that is not an object")
    return value
