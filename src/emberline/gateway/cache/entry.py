"""CacheEntry: a reply in the form in which the cache stores it.

A reply that was streamed is served from the cache as a stream of the same chunks.
"""

from __future__ import annotations

import msgspec

from emberline.gateway.core.request import GatewayReply, ReplyStream
from emberline.wire.usage import Usage

KEPT_HEADERS = ("content-type", "x-emberline-changed", "x-emberline-ignored")  # other headers belong to one reply only


class CacheEntry(msgspec.Struct, frozen=True, array_like=True):
    status: int
    headers: dict[str, str]
    model: str
    provider: str
    usage: tuple[int, ...] | None
    stream: bool
    chunks: list[bytes]

    @staticmethod
    def from_reply(reply: GatewayReply, chunks: list[bytes], is_stream: bool) -> CacheEntry:
        headers = {name: reply.headers[name] for name in KEPT_HEADERS if name in reply.headers}
        usage = msgspec.structs.astuple(reply.usage) if reply.usage is not None else None
        return CacheEntry(reply.status, headers, reply.model, reply.provider, usage, is_stream, chunks)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> CacheEntry | None:
        """Return the decoded entry, or None if a different version of Emberline wrote it in another format."""
        try:
            return msgspec.msgpack.decode(data, type=CacheEntry)
        except msgspec.MsgspecError:
            return None

    def to_reply(self) -> GatewayReply:
        """Return the cached reply with the token usage of the original reply and a cost of zero."""
        reply = GatewayReply(
            self.status,
            dict(self.headers),
            b"" if self.stream else b"".join(self.chunks),
            usage=Usage(*self.usage) if self.usage is not None else None,
            micros=0,
            model=self.model,
            provider=self.provider,
            cached=True,
        )
        if self.stream:
            reply.body = ReplayedStream(self.chunks, reply)
        return reply


class ReplayedStream:
    """A stream that sends the chunks of a cached reply."""

    def __init__(self, chunks: list[bytes], reply: GatewayReply) -> None:
        self._chunks = iter(chunks)
        self._reply = reply

    def __aiter__(self) -> ReplayedStream:
        return self

    async def __anext__(self) -> bytes:
        try:
            return next(self._chunks)
        except StopIteration:
            self._reply.ended = self._reply.ended or "complete"
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        self._reply.ended = self._reply.ended or "left"


class RecordedStream:
    """A stream that records the chunks it passes on, unless they exceed `max_bytes` in total."""

    def __init__(self, stream: ReplyStream, max_bytes: int) -> None:
        self._stream = stream
        self._bytes_left = max_bytes
        self.chunks: list[bytes] = []

    @property
    def is_complete(self) -> bool:
        return self._bytes_left >= 0

    def __aiter__(self) -> RecordedStream:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._stream.__anext__()
        if self._bytes_left >= 0:
            self._bytes_left -= len(chunk)
            self.chunks.append(chunk)
            if self._bytes_left < 0:
                self.chunks.clear()
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
