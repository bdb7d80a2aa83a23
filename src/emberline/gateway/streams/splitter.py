"""Splitter: cuts a stream of server-sent events between them. Bytes are never changed, only kept back until their event
is whole."""

from __future__ import annotations

import re

from emberline.gateway.errors import Broken

LONGEST = 32 << 20  # bytes of one event: one may carry an image

_GAP = re.compile(rb"\n\n|\r\n\r\n|\r\r|\n\r\n")


class Splitter:
    def __init__(self) -> None:
        self._kept = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with the gap at its end."""
        if not self._kept and data.find(b"\n\n") == len(data) - 2 >= 0 and b"\r" not in data:
            return [data]  # one, as most come
        searched = 0
        if self._kept:
            searched = max(0, len(self._kept) - 3)
            self._kept += data
            data = bytes(self._kept) if _GAP.search(self._kept, searched) else b""
            if not data:
                self._bounded()
                return []
        events, start = [], 0
        for gap in _GAP.finditer(data, searched):
            events.append(data[start : gap.end()])
            start = gap.end()
        self._kept = bytearray(data[start:])
        self._bounded()
        return events

    def _bounded(self) -> None:
        if len(self._kept) > LONGEST:
            raise Broken(f"an event of the stream has more than {LONGEST} bytes")

    @property
    def rest(self) -> bytes:
        """At the end of a reply: what was begun and not ended."""
        return bytes(self._kept)


def payload_of(event: bytes) -> tuple[bytes, bytes]:
    """The name and the data of an event; both b"" for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return b"", event[6:-2]
    name, data = b"", []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return name, b"\n".join(data)
