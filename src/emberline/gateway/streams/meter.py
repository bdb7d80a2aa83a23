"""Meters read usage, errors, first content and end of a reply while its bytes are passed on.

Each wire format has an event observer (`event_observers.py`), which decodes only the fields that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from emberline.core.errors import WorkTooLarge
from emberline.core.offload import HUGE_INPUT_BYTES, offload
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import Dialect
from emberline.gateway.core.token_estimate import estimate_input_tokens
from emberline.gateway.streams.event_observers import EVENT_OBSERVERS, REPLY_DECODERS, StreamState, find_usage
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.event_splitter import EventSplitter, parse_event
from emberline.wire.usage import Usage

if TYPE_CHECKING:
    EventObserver = Callable[[bytes, bytes, StreamState], None]

CHARACTERS_PER_TOKEN = 4  # estimate for replies without usage
DONE = b"data: [DONE]\n\n"


class StreamMeter:
    """Reads usage, errors and the end of one stream of server-sent events while its bytes are passed on."""

    def __init__(self, dialect: Dialect, *, hide_usage: bool = False) -> None:
        """Create a meter. `hide_usage`: drop the usage event, because only the gateway requested it."""
        self.state = StreamState()
        self.broken: UpstreamBroken | None = None  # set by a malformed event; later events are ignored
        self.data_events = 0  # number of events with data; comments only keep the connection alive
        self.missing_end = b""  # set by end(): the end event that the provider did not send
        self._splitter = EventSplitter(UpstreamBroken)
        self._dialect = dialect
        self._observe: EventObserver = EVENT_OBSERVERS[dialect]
        self._hide_usage = hide_usage

    def push(self, data: bytes) -> bytes:
        """Add `data` and return the events that are now complete.

        A malformed event is dropped. All events after an error event or a malformed event are dropped as well.
        """
        events: list[bytes] = []
        try:
            for event in self._splitter.push(data):
                events.append(self._observe_event(event))
                if self.state.error:
                    break
        except JSON_DECODE_ERRORS as e:
            self.broken = UpstreamBroken(f"an event of the stream is malformed: {e}")
        except UpstreamBroken as e:
            self.broken = e
        return events[0] if len(events) == 1 else b"".join(events)

    def needs_offload(self, data: bytes) -> bool:
        """Return whether `data` may complete a large event, so that the caller must use `push_offloaded`."""
        return len(data) + self._splitter.partial_event_size >= HUGE_INPUT_BYTES

    async def push_offloaded(self, data: bytes) -> bytes:
        """Add `data` and return the events that are now complete. Decode large events in a child process.

        Events are dropped in the same cases as in `push`.
        """
        events: list[bytes] = []
        try:
            for event in self._splitter.push(data):
                if len(event) < HUGE_INPUT_BYTES:
                    events.append(self._observe_event(event))
                else:
                    self.state.copy_from(await offload.run(len(event), observe_event, self._dialect, event, self.state))
                    self.data_events += 1
                    events.append(event)
                if self.state.error:
                    break
        except JSON_DECODE_ERRORS as e:
            self.broken = UpstreamBroken(f"an event of the stream is malformed: {e}")
        except (UpstreamBroken, WorkTooLarge) as e:
            self.broken = (
                e
                if isinstance(e, UpstreamBroken)
                else UpstreamBroken(f"an event of the stream is too large: {e.message}")
            )
        return b"".join(events)

    def _observe_event(self, event: bytes) -> bytes:
        """Update `state` with the event and return the event, or b"" if the client must not see it."""
        name, payload = parse_event(event)
        if payload:
            self.data_events += 1
            self.state.last_event_is_usage = False
            self._observe(name, payload, self.state)
            if self.state.last_event_is_usage and self._hide_usage:
                return b""
        return event

    def end(self) -> None:
        """Record that the connection has ended, and set `broken` to an exception if the stream was incomplete."""
        if self.broken is not None:
            return
        if self._dialect == "raw":
            self.state.has_ended = self.state.has_content
        if (
            self._dialect == "openai-chat"
            and not self.state.has_ended
            and self.state.has_finish_reason
            and self.state.usage_objects
        ):
            # Some servers send no [DONE]: a finish reason, usage and a clean end of the connection are enough.
            self.state.has_ended, self.missing_end = True, DONE
        if self._splitter.partial_event.strip():
            self.broken = UpstreamBroken("the stream ended within an event")
        elif not self.state.has_ended:
            missing_parts = "its end event" if self.state.has_content else "any content and without its end event"
            self.broken = UpstreamBroken(f"the stream ended without {missing_parts}")

    def usage(self, body: bytes, input_tokens: int | None = None) -> tuple[Usage | None, bool]:
        """Return the reply's usage, and whether it is an estimate.

        If the stream is incomplete or reported no usage, the output tokens are estimated from the number of characters
        in the stream. If the provider reported no input tokens, `input_tokens` is used, or else an estimate from the
        request's `body`. In an unknown wire format nothing is estimated.
        """
        reported = self.state.usage(self._dialect)
        if self._dialect == "raw" or (reported is not None and self.state.has_ended):
            return reported, False
        output = -(-self.state.content_characters // CHARACTERS_PER_TOKEN)
        if reported is None or not reported.input:
            return Usage(input=input_tokens or estimate_input_tokens(body), output=output), True
        return reported.merge_later(Usage(input=reported.input, output=output)), True


class RawReplyMeter(StreamMeter):
    """The meter of a reply in an unknown format, which is complete when the connection ends."""

    def __init__(self) -> None:
        super().__init__("raw")

    def needs_offload(self, data: bytes) -> bool:
        return False

    def push(self, data: bytes) -> bytes:
        self.state.has_content = True
        self.data_events += 1
        return data


def observe_event(dialect: Dialect, event: bytes, state: StreamState) -> StreamState:
    """Update `state` with one event and return it; runs in a child process."""
    name, payload = parse_event(event)
    state.last_event_is_usage = False
    if payload:
        EVENT_OBSERVERS[dialect](name, payload, state)
    return state


def check_reply(dialect: Dialect, body: bytes) -> tuple[Usage | None, str]:
    """Return the usage and the model of an unstreamed reply; raise UpstreamBroken if it is invalid."""
    if not body:
        raise UpstreamBroken("the provider's reply is empty")
    if dialect == "raw":
        return _find_raw_usage(body), ""
    try:
        reply: Any = REPLY_DECODERS[dialect].decode(body)
    except JSON_DECODE_ERRORS as e:
        raise UpstreamBroken(f"the provider's reply does not follow the format {dialect}: {e}") from e
    if reply.error is not None:
        raise UpstreamBroken(f"the provider sent an error with a success status: {str(reply.error)[:300]}")
    if not reply.has_content:
        raise UpstreamBroken("the provider's reply has no content")
    return Usage.parse(dialect, reply.usage_object), str(reply.model or "")


def _find_raw_usage(body: bytes) -> Usage | None:
    if b'"usage' not in body and b'"billed_units"' not in body:
        return None
    try:
        return Usage.parse("raw", find_usage(msgspec.json.decode(body)))
    except JSON_DECODE_ERRORS:
        return None
