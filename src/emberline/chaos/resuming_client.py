"""fetch_with_resumption: sends a request, and continues its stream over a new connection whenever one breaks."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed

RECONNECT_PAUSE_S = 0.1
MAX_RECONNECTS = 20
UNAVAILABLE_STATUS = 503

_EVENT_ID = re.compile(rb"^id: (.+)$", re.M)
_EVENT_ID_LINE = re.compile(rb"\nid: [^\n]+")


@dataclass(slots=True)
class ResumedReply:
    status: int = 0
    body: bytes = b""  # without event ids
    resumptions: int = 0  # connections that continued the stream after its first events
    repetitions: int = 0  # connections that began again, because nothing had arrived


async def fetch_with_resumption(
    pool: HTTPConnectionPool,
    url: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    reply: ResumedReply,
    *,
    reconnects: bool = True,
) -> None:
    """Send a request like a client that supports Last-Event-ID, and store what arrives in `reply`.

    If the connection breaks before the first event, or in a reply that is not a stream, the request is sent again. The
    caller limits the time. Raises UpstreamFailed if a stream without event ids breaks, or after MAX_RECONNECTS
    reconnections. If `reconnects` is False, raises UpstreamFailed when any connection breaks."""
    received = bytearray()
    while True:
        kept, ids = len(received), _EVENT_ID.findall(received)
        resumption = {"last-event-id": ids[-1].decode()} if ids else {}
        try:
            response = await pool.request(url, "POST", path, {**headers, **resumption}, body)
            with contextlib.closing(response):
                while part := await response.read():
                    received += part
                    reply.body = bytes(received)
            reply.status, reply.body = response.status, _EVENT_ID_LINE.sub(b"", bytes(received))
            if response.status != UNAVAILABLE_STATUS or not ids:
                return
            del received[kept:]  # the error
        except UpstreamFailed:
            reply.body = _EVENT_ID_LINE.sub(b"", bytes(received))
            if not reconnects or reply.resumptions + reply.repetitions >= MAX_RECONNECTS:
                raise
            del received[received.rfind(b"\n\n") + 2 if b"\n\n" in received else 0 :]
            if received and not _EVENT_ID.search(received):
                raise
        reply.resumptions += bool(received)
        reply.repetitions += not received
        await asyncio.sleep(RECONNECT_PAUSE_S)
