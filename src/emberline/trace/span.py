"""Span: one piece of work on a request, with a start, one end and attributes.

Spans are exported as OTLP's JSON, in which integers are strings and ids are hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from emberline.core.clock import Clock
from emberline.trace.context import Context

Attribute = str | int | float | bool
About = dict[str, Attribute | None]  # an attribute of None is not exported

OK, ERROR = 1, 2


class Kind(IntEnum):
    INTERNAL = 1
    SERVER = 2  # handles a request from another process
    CLIENT = 3  # sends a request to another process


class Event(NamedTuple):
    name: str
    at: float
    about: Mapping[str, Attribute | None]


class Spans(Protocol):
    """Receives the ended spans."""

    def put(self, span: Span) -> None:
        """Queue a span for export, without waiting."""
        ...


class Span:
    """A span with times of `clock`. If its trace is not sampled it only passes the context on."""

    __slots__ = ("_clock", "_sink", "about", "began", "context", "ended", "error", "events", "kind", "name", "parent")

    def __init__(
        self, spans: Spans, clock: Clock, name: str, kind: Kind, parent: Context, began: float | None = None
    ) -> None:
        self._sink, self._clock = spans, clock
        self.name, self.kind = name, kind
        self.context, self.parent = parent.below(), parent.span
        self.began = clock.now() if began is None else began
        self.ended: float | None = None
        self.error = ""
        self.about: About = {}
        self.events: list[Event] = []

    def child(self, name: str, kind: Kind = Kind.INTERNAL, began: float | None = None) -> Span:
        """Start a child span; a span that is not sampled returns itself."""
        if not self.context.sampled:
            return self
        return Span(self._sink, self._clock, name, kind, self.context, began)

    def event(self, name: str, **about: Attribute | None) -> None:
        self.events.append(Event(name, self._clock.now(), about))

    def end(self, error: str = "", at: float | None = None) -> None:
        if not self.context.sampled:
            return
        assert self.ended is None, "a span ends once"
        self.ended = self._clock.now() if at is None else at
        self.error = error
        self._sink.put(self)

    @property
    def size(self) -> int:
        """Approximate memory of the span in bytes: the length of its text attributes."""
        return sum(len(value) for value in self.about.values() if isinstance(value, str))

    def told(self, epoch: float) -> dict[str, Any]:
        """Return the span as OTLP's JSON; `epoch`: the Unix time in seconds at the clock's zero."""
        assert self.ended is not None
        return {
            "traceId": self.context.trace,
            "spanId": self.context.span,
            **({"parentSpanId": self.parent} if self.parent else {}),
            "name": self.name,
            "kind": int(self.kind),
            "startTimeUnixNano": _nanoseconds(self.began + epoch),
            "endTimeUnixNano": _nanoseconds(max(self.began, self.ended) + epoch),
            "attributes": attributes({**self.about, "error.type": self.error or None}),
            "events": [
                {"name": name, "timeUnixNano": _nanoseconds(at + epoch), "attributes": attributes(about)}
                for name, at, about in self.events
            ],
            "status": {"code": ERROR, "message": self.error} if self.error else {"code": OK},
        }


def attributes(about: Mapping[str, Attribute | None]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _encode_value(value)} for name, value in about.items() if value is not None]


def _encode_value(value: Attribute) -> dict[str, Any]:
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
