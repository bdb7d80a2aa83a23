"""The deltas of a streamed reply, which an EventReader parses and an EventWriter renders.

StreamStart, { content } ..., Finish, UsageUpdate, StreamEnd, where content is
TextDelta | CitationDelta | ReasoningDelta | SignatureDelta | RefusalDelta | ToolCallStart { ToolCallArguments }

`choice` is the index of the choice; `slot` the index of the tool call within it, from 0 and without gaps. UsageUpdate
may come at any time and more than once; each holds the total so far. Nothing follows StreamEnd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from emberline.gateway.core.usage import Usage
from emberline.gateway.dialects.canonical import ChatDialect, Citation, FinishReason, Json


@dataclass(slots=True)
class StreamStart:
    id: str
    model: str
    created: int = 0


@dataclass(slots=True)
class TextDelta:
    text: str
    choice: int = 0
    logprobs: list[Json] | None = None  # in the format of OpenAI's chat


@dataclass(slots=True)
class CitationDelta:
    """A citation; it follows the text that it refers to, not necessarily directly."""

    citation: Citation
    choice: int = 0


@dataclass(slots=True)
class ReasoningDelta:
    text: str
    choice: int = 0


@dataclass(slots=True)
class SignatureDelta:
    """The signature of the reasoning so far, or (`redacted`) encrypted reasoning without text."""

    signature: str
    origin: ChatDialect
    redacted: bool = False
    choice: int = 0


@dataclass(slots=True)
class RefusalDelta:
    text: str
    choice: int = 0


@dataclass(slots=True)
class ToolCallStart:
    slot: int
    id: str
    name: str
    choice: int = 0


@dataclass(slots=True)
class ToolCallArguments:
    slot: int
    text: str  # next fragment of the arguments' JSON text
    choice: int = 0


@dataclass(slots=True)
class Finish:
    reason: FinishReason
    stop_sequence: str | None = None
    choice: int = 0


@dataclass(slots=True)
class UsageUpdate:
    usage: Usage


@dataclass(slots=True)
class StreamEnd:
    """The provider marked its stream as complete."""


ContentDelta = (
    TextDelta | CitationDelta | ReasoningDelta | SignatureDelta | RefusalDelta | ToolCallStart | ToolCallArguments
)
Delta = StreamStart | ContentDelta | Finish | UsageUpdate | StreamEnd


class EventReader(Protocol):
    """Parses the events of one stream into deltas.

    Raises UpstreamBroken for a malformed stream, and UpstreamFailed for an error event of the provider.
    """

    def read(self, event: bytes) -> Iterable[Delta]:
        """Return the deltas of one event; `event` is its data, without the SSE framing."""
        ...

    def end(self) -> Iterable[Delta]:
        """Return the deltas that follow from the end of the connection, such as StreamEnd for Gemini."""
        ...


class EventWriter(Protocol):
    """Renders deltas as the events of one stream, each block closed before the next opens."""

    def write(self, delta: Delta) -> bytes: ...

    def write_error(self, error: Exception) -> bytes:
        """Return the wire format's error event, b"" if it has none."""
        ...
