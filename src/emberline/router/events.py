"""SSEBuffer: passes server-sent events on only as a whole, so that an error event can follow.

Comments are removed, and line ends (LF, CRLF or CR, all of which the format allows) become LF. Nothing else changes."""

from __future__ import annotations

LONGEST = 1 << 20  # a longer event is passed on in parts

ENDINGS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete",
           b"event: response.failed", b"event: error")  # fmt: skip


class Events:
    def __init__(self) -> None:
        self.torn = False  # the output ended within an event, so that no error event can follow
        self._kept = b""
        self._after_cr = False  # an LF that comes next is the second half of a CRLF

    def push(self, data: bytes) -> bytes:
        """Return the bytes that may be sent to the client now."""
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        if self._kept:
            data = self._kept + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = len(data) if len(data) > LONGEST or self.torn else 0
            self.torn = bool(end)
        else:
            self.torn = False
        whole, self._kept = data[:end], data[end:]
        return whole if self.torn else without_comments(whole)

    def _with_lf(self, data: bytes) -> bytes:
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def rest(self) -> bytes:
        """Return the buffered bytes at the end of the reply, complete event or not."""
        kept, self._kept = self._kept, b""
        return kept


def without_comments(events: bytes) -> bytes:
    if not events.startswith(b":") and b"\n\n:" not in events:
        return events
    return b"".join(event + b"\n\n" for event in events.split(b"\n\n")[:-1] if not event.startswith(b":"))


def last_of(events: bytes) -> int:
    """Return the index at which the last of these events begins."""
    before = events.rfind(b"\n\n", 0, len(events) - 2)
    return 0 if before < 0 else before + 2
