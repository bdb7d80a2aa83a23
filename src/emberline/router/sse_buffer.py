"""SSEBuffer: buffers an incomplete server-sent event until its end arrives.

The client thus receives complete events only, and an error event can follow at any time. Comments are removed, and all
line ends (LF, CRLF or CR) become LF. Nothing else is changed."""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 20  # a longer event is passed on in parts

FINAL_EVENT_PREFIXES = (b"data: [DONE]", b"event: message_stop", b"event: response.completed",
                        b"event: response.incomplete", b"event: response.failed", b"event: error")  # fmt: skip


class SSEBuffer:
    def __init__(self) -> None:
        self.is_mid_event = False  # the output ended within an event, so that no error event can follow
        self._partial_event = b""
        self._ended_with_cr = False  # an LF that comes next is the second half of a CRLF

    def push(self, data: bytes) -> bytes:
        """Add received bytes, and return the bytes that can be sent to the client now."""
        if self._ended_with_cr or b"\r" in data:
            data = self._normalize_line_ends(data)
        if self._partial_event:
            data = self._partial_event + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = len(data) if len(data) > MAX_EVENT_BYTES or self.is_mid_event else 0
            self.is_mid_event = bool(end)
        else:
            self.is_mid_event = False
        complete, self._partial_event = data[:end], data[end:]
        return complete if self.is_mid_event else remove_comments(complete)

    def _normalize_line_ends(self, data: bytes) -> bytes:
        if self._ended_with_cr:
            data = data.removeprefix(b"\n")
        self._ended_with_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def take_remaining_bytes(self) -> bytes:
        """Return the bytes that are still buffered when the reply ends, even if the last event is incomplete."""
        kept, self._partial_event = self._partial_event, b""
        return kept


def remove_comments(events: bytes) -> bytes:
    if not events.startswith(b":") and b"\n\n:" not in events:
        return events
    return b"".join(event + b"\n\n" for event in events.split(b"\n\n")[:-1] if not event.startswith(b":"))


def find_last_event_start(events: bytes) -> int:
    """Return the index in `events` at which the last event begins."""
    before = events.rfind(b"\n\n", 0, len(events) - 2)
    return 0 if before < 0 else before + 2
