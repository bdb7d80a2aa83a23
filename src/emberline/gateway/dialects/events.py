"""Extracts and decodes the data of server-sent events from a byte stream."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.net.json_errors import JSON_DECODE_ERRORS

T = TypeVar("T")

MAX_EVENT_BYTES = 32 << 20  # one event can carry a whole image


class EventDataSplitter:
    """Returns the data of each complete event, without its name: every format repeats it in the data."""

    def __init__(self) -> None:
        self._partial = b""

    def push(self, data: bytes) -> list[bytes]:
        data = self._partial + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")  # a CR at the very end stays until its LF arrives
        *events, self._partial = data.split(b"\n\n")
        if len(self._partial) > MAX_EVENT_BYTES:
            raise UpstreamBroken(f"an event of the stream is larger than the limit of {MAX_EVENT_BYTES} bytes")
        return [payload for event in events if (payload := _event_data(event))]

    def has_partial_event(self) -> bool:
        """Return whether bytes of an incomplete event are left."""
        return bool(self._partial.strip())


def _event_data(event: bytes) -> bytes:
    start = event.find(b"data: ")  # fast path: nearly all events are one line of data, with or without a name before it
    if start >= 0 and (start == 0 or event[start - 1] == 10) and event.find(b"\n", start) < 0:
        return event[start + 6 :]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class EventDecoder(Generic[T]):
    """Decodes the data of one wire format's events; raises UpstreamBroken for anything else."""

    def __init__(self, event_type: type[T], format_name: str) -> None:
        self._decoder = msgspec.json.Decoder(event_type)
        self._format_name = format_name

    def decode(self, event: bytes) -> T:
        try:
            return self._decoder.decode(event)
        except JSON_DECODE_ERRORS as error:
            raise UpstreamBroken(
                f"an event of the stream does not follow the format of {self._format_name}: {error}"
            ) from None
