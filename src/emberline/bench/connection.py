"""MinimalHTTPConnection: an HTTP/1.1 client connection that uses little CPU time and carries one request at a time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httptools
import msgspec

from emberline.core.errors import EmberlineError

READ_BYTES = 1 << 16


class HTTPRequestFailed(EmberlineError):
    """The server replied with a status of 400 or more, sent an invalid reply, or closed the connection."""


class ServerUnreachable(HTTPRequestFailed):
    """No connection to the server could be opened."""


class HTTPReplyParser:
    """Parses one HTTP reply with httptools and collects its body."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.complete = self.keep = False

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep = self.parser.should_keep_alive()  # not known before the end of the message

    def take_body(self) -> bytes:
        data = b"".join(self.parts)
        self.parts.clear()
        return data


class MinimalHTTPConnection:
    def __init__(self, url: str, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: the context for an https URL; by default one with the system's CAs."""
        at = urlsplit(url)
        if at.scheme not in ("http", "https") or not at.hostname:
            raise HTTPRequestFailed(f"the server URL is {url!r}, but it must begin with http:// or https://")
        self._host, self._tls = at.hostname, at.scheme == "https"
        self._port = at.port or (443 if self._tls else 80)
        self._context = tls
        self._head = f"host: {at.netloc}\r\naccept: */*\r\n" + (
            f"authorization: Bearer {api_key}\r\n" if api_key else ""
        )
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream_reply(self, path: str, body: bytes | None = None) -> AsyncIterator[bytes]:
        """Send a request and yield the parts of the reply's body as they arrive.

        The request is a POST if `body` is given, otherwise a GET. If the caller stops iterating early, the connection
        is closed. Raises HTTPRequestFailed for an error status or a broken connection.
        """
        done = False
        try:
            await self._send_request(path, body)
            assert self._reader is not None
            reply = HTTPReplyParser()
            while not reply.complete:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise HTTPRequestFailed("the server closed the connection before the end of its reply")
                reply.parser.feed_data(data)
                if reply.parser.get_status_code() < 400 and (part := reply.take_body()):
                    yield part
            if (status := reply.parser.get_status_code()) >= 400:
                raise HTTPRequestFailed(
                    f"the server replied with status {status}: {reply.take_body()[:300].decode(errors='replace')}"
                )
            done = reply.keep
        except (OSError, httptools.HttpParserError) as e:
            raise HTTPRequestFailed(f"the HTTP request failed: {type(e).__name__}: {e}") from e
        finally:
            if not done:
                self.close()

    async def fetch(self, path: str, body: bytes | None = None) -> bytes:
        return b"".join([part async for part in self.stream_reply(path, body)])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _send_request(self, path: str, body: bytes | None) -> None:
        if self._reader is None or self._reader.at_eof():  # the server may close idle connections
            self.close()
            if self._tls and self._context is None:
                self._context = ssl.create_default_context()
            context = self._context if self._tls else None
            try:
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=context)
            except OSError as e:
                raise ServerUnreachable(f"cannot connect to {self._host}:{self._port}: {type(e).__name__}: {e}") from e
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        assert self._writer is not None
        self._writer.write(head.encode() + b"\r\n" + (body or b""))
        await self._writer.drain()


async def parse_sse_events(body_parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, object]]:
    """Yield the JSON data of each server-sent event in a stream of bytes. The final `[DONE]` is skipped."""
    rest = b""
    async for part in body_parts:
        *whole, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield msgspec.json.decode(data)
