"""Server-sent events out of bytes that may be cut anywhere, and what their data says."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from emberline.gateway.errors import Broken
from emberline.net.notjson import NOT_JSON

T = TypeVar("T")

MOST = 32 << 20  # bytes of one event: pictures come whole


class EventSplitter:
    """Gives the data of each whole event. Names are left out: every dialect repeats them in the data."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")  # a CR at the very end waits for its LF
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MOST:
            raise Broken(f"an event of the stream is larger than {MOST} bytes")
        return [payload for event in events if (payload := _payload(event))]

    def unfinished(self) -> bool:
        """Whether bytes are left that are no whole event."""
        return bool(self._rest.strip())


def _payload(event: bytes) -> bytes:
    start = event.find(b"data: ")  # nearly all are one line of data, with or without a name before it
    if start >= 0 and (start == 0 or event[start - 1] == 10) and event.find(b"\n", start) < 0:
        return event[start + 6 :]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class EventDecoder(Generic[T]):
    """The data of one dialect's events; what is none of them is Broken."""

    def __init__(self, event_type: type[T], format_name: str) -> None:
        self._decoder = msgspec.json.Decoder(event_type)
        self._whose = format_name

    def decode(self, event: bytes) -> T:
        try:
            return self._decoder.decode(event)
        except NOT_JSON as error:
            raise Broken(f"an event of the stream is not one of {self._whose}: {error}") from None
