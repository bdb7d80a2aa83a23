"""At once: a reply of one piece as one write. As two messages of ASGI it costs uvicorn two writes and two searches of
every header, more than most of what a gateway does for a call. Whatever is unusual goes the usual way."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from emberline.server.exchange import Exchange, Send

_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def replied_at_once(x: Exchange, send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> bool:
    """False: nothing was sent. `send` is the server's own."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or x.method == "HEAD" or status < 200 or status in (204, 304):
        return False
    if cycle.response_started or cycle.disconnected or cycle.access_log or not cycle.keep_alive:
        return False
    if cycle.flow.write_paused or not (head := _head(status, len(body), headers)):
        return False
    x.status = status
    cycle.response_started = cycle.response_complete = True
    cycle.transport.write(head + body)
    cycle.message_event.set()
    cycle.on_response()
    return True


def _head(status: int, size: int, headers: Mapping[str, str]) -> bytes:
    """b"": it cannot be written so, or not at all."""
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}", f"content-length: {size}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(lines)
    breaks = len(lines) - 1
    if text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text or not text.isascii():
        return b""
    return text.encode() + b"\r\n\r\n"
