"""BlockingClient: sends HTTP requests one after the other over one connection, without an event loop.

The client's own time is part of every latency that it measures, so the client does as little as possible.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httptools

from emberline.bench.connection import READ_BYTES, HTTPReplyParser, HTTPRequestFailed

REPLY_TIMEOUT_S = 60.0  # seconds to wait for the next part of a reply


class BlockingClient:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        at = urlsplit(url)
        assert at.scheme == "http" and at.hostname is not None and at.port is not None, f"{url} is not http://HOST:PORT"
        self._head = f"host: {at.netloc}\r\naccept: */*\r\ncontent-type: application/json\r\n"
        self._head += f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._socket = socket.create_connection((at.hostname, at.port), REPLY_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        reply = HTTPReplyParser()
        try:
            self._socket.sendall(head.encode() + body)
            while not reply.complete:
                data = self._socket.recv(READ_BYTES)
                if not data:
                    raise HTTPRequestFailed("the server closed the connection before the end of its reply")
                reply.parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as e:
            raise HTTPRequestFailed(f"the HTTP request failed: {type(e).__name__}: {e}") from e
        if (status := reply.parser.get_status_code()) >= 400:
            raise HTTPRequestFailed(
                f"the server replied with status {status}: {reply.take_body()[:300].decode(errors='replace')}"
            )
        return reply.take_body()

    def close(self) -> None:
        self._socket.close()
