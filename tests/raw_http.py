"""An HTTP server for tests, and clients that send raw bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from emberline.net.server import HTTPServer
from emberline.net.server_state import App, Receive, Send

GET = b"GET /a%20b?c=%20d HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> tuple[bytes, bytes]:
        """Return head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), 0)
        return head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        return await self.reader.read()


def run(app: App, work: Callable[[Callable[[], Awaitable[Client]], HTTPServer], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            server = HTTPServer(app)
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            await server.start(listener)
            port = listener.getsockname()[1]

            async def client() -> Client:
                return Client(*await asyncio.open_connection("127.0.0.1", port))

            try:
                await work(client, server)
            finally:
                await server.stop(0.0)

    asyncio.run(main())


async def body_of(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


async def answer(send: Send, body: bytes, status: int = 200, headers: Any = ()) -> None:
    sized = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [sized, *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    await answer(send, b"%b %b" % (scope["path"].encode(), await body_of(receive)))


async def all_left(server: HTTPServer) -> None:
    async with asyncio.timeout(10):
        while server.state.connections:
            await asyncio.sleep(0.01)
