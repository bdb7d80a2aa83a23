"""Meters a reply from the bytes that pass through: first content, usage, errors and its end.

Each wire format has an event observer (`event_observers.py`), which decodes only the fields that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from emberline.core.errors import WorkTooLarge
from emberline.core.offload import HUGE, offload
from emberline.gateway.call import Dialect
from emberline.gateway.costs.estimate import estimated_input
from emberline.gateway.costs.usage import Usage
from emberline.gateway.errors import Broken
from emberline.gateway.streams.gauges import GAUGES, WHOLE, Signs, usage_within
from emberline.gateway.streams.splitter import Splitter, payload_of
from emberline.net.notjson import NOT_JSON

if TYPE_CHECKING:
    Gauge = Callable[[bytes, bytes, Signs], None]

CHARACTERS = 4  # estimate for replies without usage
DONE = b"data: [DONE]\n\n"


class Meter:
    """The meter of one stream of server-sent events."""

    def __init__(self, dialect: Dialect, *, hide_usage: bool = False) -> None:
        """`hide_usage`: drop the usage event, which the gateway requested and the client did not."""
        self.signs = Signs()
        self.broken: Broken | None = None  # set by a malformed event; later events are ignored
        self.progress = 0  # number of events with data; comments only keep the connection alive
        self.missing = b""  # set by end(): the end event that the provider did not send
        self._splitter = Splitter()
        self._dialect = dialect
        self._gauge: Gauge = GAUGES[dialect]
        self._hide_usage = hide_usage

    def push(self, data: bytes) -> bytes:
        """Return the complete events, up to and including an error event, or up to before a malformed one."""
        events: list[bytes] = []
        try:
            for event in self._splitter.push(data):
                events.append(self._pushed(event))
                if self.signs.failed:
                    break
        except NOT_JSON as e:
            self.broken = Broken(f"an event of the stream is malformed: {e}")
        except Broken as e:
            self.broken = e
        return events[0] if len(events) == 1 else b"".join(events)

    def is_heavy(self, data: bytes) -> bool:
        """Return whether to use `push_offloaded`: an event may be complete that takes long to decode."""
        return len(data) + self._splitter.size >= HUGE

    async def push_heavy(self, data: bytes) -> bytes:
        """Do what `push` does, but decode large events in a child process."""
        events: list[bytes] = []
        try:
            for event in self._splitter.push(data):
                if len(event) < HUGE:
                    events.append(self._pushed(event))
                else:
                    self.signs.become(await offload.run(len(event), gauged, self._dialect, event, self.signs))
                    self.progress += 1
                    events.append(event)
                if self.signs.failed:
                    break
        except NOT_JSON as e:
            self.broken = Broken(f"an event of the stream is malformed: {e}")
        except (Broken, WorkTooLarge) as e:
            self.broken = e if isinstance(e, Broken) else Broken(f"an event of the stream is too large: {e.message}")
        return b"".join(events)

    def _pushed(self, event: bytes) -> bytes:
        """Observe the event and return it, b"" if the client must not see it."""
        name, payload = payload_of(event)
        if payload:
            self.progress += 1
            self.signs.only_usage = False
            self._gauge(name, payload, self.signs)
            if self.signs.only_usage and self._hide_usage:
                return b""
        return event

    def end(self) -> None:
        """Note that the connection ended; sets `broken` if the stream was incomplete."""
        if self.broken is not None:
            return
        if self._dialect == "raw":
            self.signs.ended = self.signs.begun
        if self._dialect == "openai-chat" and not self.signs.ended and self.signs.finished and self.signs.told:
            # Some servers send no [DONE]: a finish reason, usage and a clean end of the connection are enough.
            self.signs.ended, self.missing = True, DONE
        if self._splitter.rest.strip():
            self.broken = Broken("the stream ended within an event")
        elif not self.signs.ended:
            missing_parts = "its end event" if self.signs.begun else "any content and without its end event"
            self.broken = Broken(f"the stream ended without {missing_parts}")

    def usage(self, body: bytes, tokens: int | None = None) -> tuple[Usage | None, bool]:
        """Return the reply's usage, and whether it is an estimate.

        The usage of an incomplete stream is estimated: the input from `tokens` or the request's `body`, the output from
        the characters that passed.
        """
        reported = self.signs.usage(self._dialect)
        if self._dialect == "raw" or (reported is not None and self.signs.ended):
            return reported, False
        output = -(-self.signs.characters // CHARACTERS)
        if reported is None or not reported.input:
            return Usage(input=tokens or estimated_input(body), output=output), True
        return reported.joined(Usage(input=reported.input, output=output)), True


class RawMeter(Meter):
    """The meter of a reply in an unknown format, which ends with the connection."""

    def __init__(self) -> None:
        super().__init__("raw")

    def is_heavy(self, data: bytes) -> bool:
        return False

    def push(self, data: bytes) -> bytes:
        self.signs.begun = True
        self.progress += 1
        return data


def gauged(dialect: Dialect, event: bytes, state: Signs) -> Signs:
    """Update `state` with one event and return it; runs in a child process."""
    name, payload = payload_of(event)
    state.only_usage = False
    if payload:
        GAUGES[dialect](name, payload, state)
    return state


def check_whole(dialect: Dialect, body: bytes) -> tuple[Usage | None, str]:
    """Return the usage and the model of an unstreamed reply; raise Broken if it is not a valid one."""
    if not body:
        raise Broken("the provider's reply is empty")
    if dialect == "raw":
        return _raw_usage(body), ""
    try:
        reply: Any = WHOLE[dialect].decode(body)
    except NOT_JSON as e:
        raise Broken(f"the provider's reply does not follow the format {dialect}: {e}") from e
    if reply.error is not None:
        raise Broken(f"the provider sent an error with a success status: {str(reply.error)[:300]}")
    if not reply.content:
        raise Broken("the provider's reply has no content")
    return Usage.read(dialect, reply.usage_object), str(reply.model or "")


def _raw_usage(body: bytes) -> Usage | None:
    if b'"usage' not in body and b'"billed_units"' not in body:
        return None
    try:
        return Usage.read("raw", usage_within(msgspec.json.decode(body)))
    except NOT_JSON:
        return None
