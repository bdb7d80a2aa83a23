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

from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects.inner import Citation, Json, Reason, Spoken


@dataclass(slots=True)
class Opened:
    id: str
    model: str
    created: int = 0


@dataclass(slots=True)
class TextPiece:
    text: str
    choice: int = 0
    logprobs: list[Json] | None = None  # in the format of OpenAI's chat


@dataclass(slots=True)
class Cited:
    """A citation; it follows the text that it refers to, not necessarily directly."""

    citation: Citation
    choice: int = 0


@dataclass(slots=True)
class ThinkingPiece:
    text: str
    choice: int = 0


@dataclass(slots=True)
class Sealed:
    """The signature of the reasoning so far, or (`redacted`) encrypted reasoning without text."""

    seal: str
    family: Spoken
    redacted: bool = False
    choice: int = 0


@dataclass(slots=True)
class RefusalPiece:
    text: str
    choice: int = 0


@dataclass(slots=True)
class ToolOpened:
    slot: int
    id: str
    name: str
    choice: int = 0


@dataclass(slots=True)
class ToolPiece:
    slot: int
    text: str  # next fragment of the arguments' JSON text
    choice: int = 0


@dataclass(slots=True)
class Finished:
    reason: Reason
    stop_sequence: str | None = None
    choice: int = 0


@dataclass(slots=True)
class Counted:
    usage: Usage


@dataclass(slots=True)
class Ended:
    """The provider marked its stream as complete."""


Content = TextPiece | Cited | ThinkingPiece | Sealed | RefusalPiece | ToolOpened | ToolPiece
Delta = Opened | Content | Finished | Counted | Ended


class Reader(Protocol):
    """Parses the events of one stream into deltas.

    Raises Broken for a malformed stream, and UpstreamFailed for an error event of the provider.
    """

    def read(self, event: bytes) -> Iterable[Delta]:
        """Return the deltas of one event; `event` is its data, without the SSE framing."""
        ...

    def end(self) -> Iterable[Delta]:
        """Return the deltas that follow from the end of the connection, such as StreamEnd for Gemini."""
        ...


class Writer(Protocol):
    """Renders deltas as the events of one stream, each block closed before the next opens."""

    def push(self, delta: Delta) -> bytes: ...

    def fail(self, error: Exception) -> bytes:
        """Return the wire format's error event, b"" if it has none."""
        ...
