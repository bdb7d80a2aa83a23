"""Meter: what a reply says about itself, read from the bytes that pass: its first content, its usage, an error within,
its ending. Each dialect has a gauge, which decodes of an event only what it needs."""

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

CHARACTERS = 4  # of a token, about
DONE = b"data: [DONE]\n\n"


class Meter:
    """Of one stream."""

    def __init__(self, dialect: Dialect, *, hide_usage: bool = False) -> None:
        """`hide_usage`: the client did not ask for the event that tells it, we did."""
        self.signs = Signs()
        self.broken: Broken | None = None  # an event was not one: nothing after it counts
        self.progress = 0  # events with data; comments only keep a connection alive
        self.missing = b""  # at the end: the closing event that the provider left out
        self._splitter = Splitter()
        self._dialect = dialect
        self._gauge: Gauge = GAUGES[dialect]
        self._hide_usage = hide_usage

    def push(self, data: bytes) -> bytes:
        """The events that are whole now, up to one that is an error (with it) or malformed (without)."""
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
        """Whether to push these bytes by `push_heavy`: with them an event may be whole that takes long to decode."""
        return len(data) + self._splitter.size >= HUGE

    async def push_heavy(self, data: bytes) -> bytes:
        """As `push`; a large event is read in another process."""
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
        """The event; b"": it is kept from the client."""
        name, payload = payload_of(event)
        if payload:
            self.progress += 1
            self.signs.only_usage = False
            self._gauge(name, payload, self.signs)
            if self.signs.only_usage and self._hide_usage:
                return b""
        return event

    def end(self) -> None:
        """The reply is over."""
        if self.broken is not None:
            return
        if self._dialect == "raw":
            self.signs.ended = self.signs.begun
        if self._dialect == "openai-chat" and not self.signs.ended and self.signs.finished and self.signs.told:
            # A reason to stop and the usage, and then a clean end of the reply: some servers send no [DONE].
            self.signs.ended, self.missing = True, DONE
        if self._splitter.rest.strip():
            self.broken = Broken("the stream ended within an event")
        elif not self.signs.ended:
            missing_parts = "its ending" if self.signs.begun else "a beginning and an ending"
            self.broken = Broken(f"the stream ended without {missing_parts}")

    def usage(self, body: bytes, tokens: int | None = None) -> tuple[Usage | None, bool]:
        """What was told; of a stream that was not told to its end, also what can be counted: the input from `body`, the
        output from what passed. True: counted. `tokens`: of the input, where it has been estimated."""
        reported = self.signs.usage(self._dialect)
        if self._dialect == "raw" or (reported is not None and self.signs.ended):
            return reported, False
        output = -(-self.signs.characters // CHARACTERS)
        if reported is None or not reported.input:
            return Usage(input=tokens or estimated_input(body), output=output), True
        return reported.joined(Usage(input=reported.input, output=output)), True


class RawMeter(Meter):
    """Of a reply that is no stream of events: its bytes pass as they come, and its end is the end."""

    def __init__(self) -> None:
        super().__init__("raw")

    def is_heavy(self, data: bytes) -> bool:
        return False

    def push(self, data: bytes) -> bytes:
        self.signs.begun = True
        self.progress += 1
        return data


def gauged(dialect: Dialect, event: bytes, state: Signs) -> Signs:
    """What the stream has said about itself with this event."""
    name, payload = payload_of(event)
    state.only_usage = False
    if payload:
        GAUGES[dialect](name, payload, state)
    return state


def check_whole(dialect: Dialect, body: bytes) -> tuple[Usage | None, str]:
    """The usage and the model of a reply that came in one piece; Broken, if it is none."""
    if not body:
        raise Broken("the reply is empty")
    if dialect == "raw":
        return _raw_usage(body), ""
    try:
        reply: Any = WHOLE[dialect].decode(body)
    except NOT_JSON as e:
        raise Broken(f"the reply is not what it should be: {e}") from e
    if reply.error is not None:
        raise Broken(f"the reply is an error with a status of success: {str(reply.error)[:300]}")
    if not reply.content:
        raise Broken("the reply has no content")
    return Usage.read(dialect, reply.usage_object), str(reply.model or "")


def _raw_usage(body: bytes) -> Usage | None:
    if b'"usage' not in body and b'"billed_units"' not in body:
        return None
    try:
        return Usage.read("raw", usage_within(msgspec.json.decode(body)))
    except NOT_JSON:
        return None
