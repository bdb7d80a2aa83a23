"""Span: one piece of work on a request, with a start, one end and attributes.

Spans are exported as OTLP's JSON, in which integers are strings and ids are hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from emberline.core.clock import Clock
from emberline.trace.context import TraceContext

AttributeValue = str | int | float | bool
Attributes = dict[str, AttributeValue | None]  # an attribute of None is not exported

STATUS_OK, STATUS_ERROR = 1, 2


class SpanKind(IntEnum):
    INTERNAL = 1
    SERVER = 2  # handles a request from another process
    CLIENT = 3  # sends a request to another process


class SpanEvent(NamedTuple):
    name: str
    time: float
    attributes: Mapping[str, AttributeValue | None]


class SpanSink(Protocol):
    """Receives the ended spans."""

    def put(self, span: Span) -> None:
        """Queue a span for export, without waiting."""
        ...


class Span:
    """A span with times of `clock`. If its trace is not sampled it only passes the context on."""

    __slots__ = (
        "_clock",
        "_sink",
        "attributes",
        "context",
        "end_time",
        "error_code",
        "events",
        "kind",
        "name",
        "parent_id",
        "start_time",
    )

    def __init__(
        self,
        sink: SpanSink,
        clock: Clock,
        name: str,
        kind: SpanKind,
        parent: TraceContext,
        start_time: float | None = None,
    ) -> None:
        self._sink, self._clock = sink, clock
        self.name, self.kind = name, kind
        self.context, self.parent_id = parent.new_child(), parent.span_id
        self.start_time = clock.now() if start_time is None else start_time
        self.end_time: float | None = None
        self.error_code = ""
        self.attributes: Attributes = {}
        self.events: list[SpanEvent] = []

    def start_child(self, name: str, kind: SpanKind = SpanKind.INTERNAL, start_time: float | None = None) -> Span:
        """Start a child span; a span that is not sampled returns itself."""
        if not self.context.is_sampled:
            return self
        return Span(self._sink, self._clock, name, kind, self.context, start_time)

    def add_event(self, name: str, **attributes: AttributeValue | None) -> None:
        self.events.append(SpanEvent(name, self._clock.now(), attributes))

    def end(self, error_code: str = "", end_time: float | None = None) -> None:
        if not self.context.is_sampled:
            return
        assert self.end_time is None, "a span ends once"
        self.end_time = self._clock.now() if end_time is None else end_time
        self.error_code = error_code
        self._sink.put(self)

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the span in bytes: the length of its text attributes."""
        return sum(len(value) for value in self.attributes.values() if isinstance(value, str))

    def to_otlp(self, epoch: float) -> dict[str, Any]:
        """Return the span as OTLP's JSON; `epoch`: the Unix time in seconds at the clock's zero."""
        assert self.end_time is not None
        return {
            "traceId": self.context.trace_id,
            "spanId": self.context.span_id,
            **({"parentSpanId": self.parent_id} if self.parent_id else {}),
            "name": self.name,
            "kind": int(self.kind),
            "startTimeUnixNano": _nanoseconds(self.start_time + epoch),
            "endTimeUnixNano": _nanoseconds(max(self.start_time, self.end_time) + epoch),
            "attributes": encode_attributes({**self.attributes, "error.type": self.error_code or None}),
            "events": [
                {"name": name, "timeUnixNano": _nanoseconds(time + epoch), "attributes": encode_attributes(attributes)}
                for name, time, attributes in self.events
            ],
            "status": {"code": STATUS_ERROR, "message": self.error_code} if self.error_code else {"code": STATUS_OK},
        }


def encode_attributes(attributes: Mapping[str, AttributeValue | None]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _encode_value(value)} for name, value in attributes.items() if value is not None]


def _encode_value(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": value}


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e6) * 1000)
