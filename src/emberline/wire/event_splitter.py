"""Splits a stream of server-sent events into complete events without changing their bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

LARGE_CHUNK_BYTES = 1 << 18  # from this size each separator is searched for on its own
MAX_EVENT_BYTES = 32 << 20  # one event can carry a whole image

_SEPARATORS = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
_SEPARATOR = re.compile(b"|".join(_SEPARATORS))


class EventSplitter:
    def __init__(self, make_error: Callable[[str], Exception]) -> None:
        """`make_error` makes the exception for an event that is too large, from an error message."""
        self._partial = bytearray()
        self._error_type = make_error

    def push(self, data: bytes) -> list[bytes]:
        """Add `data` and return the events that are now complete, each with the empty line at its end."""
        if not self._partial and data.find(b"\n\n") == len(data) - 2 >= 0 and b"\r" not in data:
            return [data]  # fast path: most chunks are exactly one event
        searched = 0
        if self._partial:
            searched = max(0, len(self._partial) - 3)
            self._partial += data
            data = bytes(self._partial) if _SEPARATOR.search(self._partial, searched) else b""
            if not data:
                self._check_size()
                return []
        events, start = [], 0
        for end in (
            _find_event_ends(data, searched)
            if len(data) < LARGE_CHUNK_BYTES
            else _find_event_ends_in_large_data(data, searched)
        ):
            events.append(data[start:end])
            start = end
        self._partial = bytearray(data[start:])
        self._check_size()
        return events

    def _check_size(self) -> None:
        if len(self._partial) > MAX_EVENT_BYTES:
            raise self._error_type(f"an event of the stream is larger than the limit of {MAX_EVENT_BYTES} bytes")

    @property
    def partial_event_size(self) -> int:
        """Size of the event that is not yet complete, in bytes."""
        return len(self._partial)

    @property
    def partial_event(self) -> bytes:
        """The bytes received so far of the event that is not yet complete."""
        return bytes(self._partial)


def _find_event_ends(data: bytes, start: int) -> Iterator[int]:
    """Yield the position after the end of each event, from position `start` on."""
    return (separator.end() for separator in _SEPARATOR.finditer(data, start))


def _find_event_ends_in_large_data(data: bytes, start: int) -> Iterator[int]:
    """Yield the same positions as `_find_event_ends`, but faster for large events (30 MB: 0.03 s, not 0.3 s)."""
    nearest = {separator: data.find(separator, start) for separator in _SEPARATORS}
    at = start
    while True:
        for separator, found in nearest.items():
            if -1 < found < at:
                nearest[separator] = data.find(separator, at)
        found_ahead = [(found, separator) for separator, found in nearest.items() if found >= 0]
        if not found_ahead:
            return
        found, separator = min(found_ahead)
        at = found + len(separator)
        yield at


def read_event_data(event: bytes) -> bytes:
    """Return the data of an event, or b"" for a comment. Faster than `parse_event`."""
    start = event.find(b"data: ")  # nearly all events are one line of data, with or without a name before it
    if (
        start >= 0
        and (start == 0 or event[start - 1] == 10)
        and event.find(b"\n", start) == len(event) - 2
        and event.find(b"\r") < 0
    ):
        return event[start + 6 : -2]
    return parse_event(event)[1]


def parse_event(event: bytes) -> tuple[bytes, bytes]:
    """Return the name and the data of an event; both are b"" for a comment."""
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
