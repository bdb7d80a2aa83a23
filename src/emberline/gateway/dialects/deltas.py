"""A streamed reply, piece by piece: what a Reader makes of a dialect's events, and a Writer of these makes events.

Opened, { TextPiece | Cited | ThinkingPiece | Sealed | RefusalPiece | ToolOpened { ToolPiece } } ..., Finished, Counted,
Ended

`choice` is which answer of several; `slot` which call of that answer, from 0 and without gaps. Counted may come at any
time and more than once: each holds all that is known. Nothing follows Ended.
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
    logprobs: list[Json] | None = None  # as OpenAI's chat shows them


@dataclass(slots=True)
class Cited:
    """It comes after the text that it is about, if not right after it."""

    citation: Citation
    choice: int = 0


@dataclass(slots=True)
class ThinkingPiece:
    text: str
    choice: int = 0


@dataclass(slots=True)
class Sealed:
    """The signature of the thinking so far, or thoughts that are told in no other way."""

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
    text: str  # a further piece of the arguments' JSON text
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
    """The source said that its stream is whole."""


Content = TextPiece | Cited | ThinkingPiece | Sealed | RefusalPiece | ToolOpened | ToolPiece
Delta = Opened | Content | Finished | Counted | Ended


class Reader(Protocol):
    """Events of a dialect to deltas. What does not belong raises Broken, an error that was told UpstreamFailed."""

    def read(self, event: bytes) -> Iterable[Delta]:
        """`event` is the data of one."""
        ...

    def end(self) -> Iterable[Delta]:
        """No more events come: Ended, if only now that is known."""
        ...


class Writer(Protocol):
    """Deltas to events of a dialect: one beginning, every block closed before the next opens, one end."""

    def push(self, delta: Delta) -> bytes: ...

    def fail(self, error: Exception) -> bytes:
        """The stream breaks: the dialect's event for it, as far as there is one."""
        ...
