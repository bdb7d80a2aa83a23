"""Events: cuts a stream of server-sent events between them, so that an error can follow what has been sent. Bytes are
never changed, only kept back until their event is whole."""

from __future__ import annotations

LONGEST = 1 << 20  # bytes of one event; a longer one goes on in pieces

_ENDINGS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete",
            b"event: response.failed", b"event: error")  # fmt: skip


class Events:
    def __init__(self) -> None:
        self.torn = False  # part of an event has been let through: nothing can follow it
        self.ended = False  # the protocol's own ending has passed
        self.count = 0
        self._kept = b""

    def push(self, data: bytes) -> bytes:
        """What may be sent on."""
        if self._kept:
            data = self._kept + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = len(data) if len(data) > LONGEST or self.torn else 0
            self.torn = bool(end)
        else:
            self.torn = False
        whole, self._kept = data[:end], data[end:]
        self.count += whole.count(b"\n\n")
        if whole and not self.torn:
            self.ended = whole.startswith(_ENDINGS, _last(whole))
        return whole

    def rest(self) -> bytes:
        """At the end of the reply: what was kept, whatever it is."""
        kept, self._kept = self._kept, b""
        return kept


def _last(whole: bytes) -> int:
    """Where the last of these events begins."""
    before = whole.rfind(b"\n\n", 0, len(whole) - 2)
    return 0 if before < 0 else before + 2
