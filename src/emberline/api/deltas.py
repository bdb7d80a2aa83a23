"""The typed stream every protocol renders: what a generation says, piece by piece. Plain replies are folds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

Reason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token as logprobs show it."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None  # None: the first prompt token has none
    top: Sequence[TokenInfo] = ()
    offset: int = 0  # where its text begins: in the prompt's text, or in what was generated


@dataclass(frozen=True, slots=True)
class Started:
    """The first delta of every stream: the prompt's cost, known before the first token is."""

    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What all choices have cost so far, before the pieces it counts: only when running_usage was asked for."""

    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt itself, before a choice's first text: only when echo or prompt_logprobs were asked for."""

    index: int
    text: str
    tokens: Sequence[TokenInfo] = ()  # with prompt_logprobs


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A choice's newest tokens, before the pieces made of them: only when return_token_ids was asked for."""

    index: int
    ids: Sequence[int]
    prompt: Sequence[int] = ()  # those of the prompt, with a choice's first


class TextDelta(msgspec.Struct, frozen=True):  # no dataclass: one is made for every event
    index: int  # which choice
    text: str
    tokens: Sequence[TokenInfo] = ()  # when logprobs were asked for


class ReasoningDelta(msgspec.Struct, frozen=True):
    index: int
    text: str
    tokens: Sequence[TokenInfo] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    slot: int  # which call of this choice, from 0
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    index: int
    slot: int
    text: str  # a further piece of the arguments' JSON text


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; each has exactly one."""

    index: int
    reason: Reason
    stop_sequence: str | None = None
    stop_token: int | None = None  # the token that ended it, if it is one of those that do
    asked_stop: bool = False  # `stop_token` is one of the request's stop_token_ids

    def reasons(self) -> dict[str, str | int | None]:
        """What ended it, as vLLM (without the model's own end tokens) and SGLang (with them) tell it."""
        asked = self.stop_token if self.asked_stop else None
        return {
            "stop_reason": asked if self.stop_sequence is None else self.stop_sequence,
            "matched_stop": self.stop_token if self.stop_sequence is None else self.stop_sequence,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Comes once, last, after every choice has finished."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


Delta = (
    Started
    | Progress
    | PromptDelta
    | TokenIds
    | TextDelta
    | ReasoningDelta
    | ToolCallStart
    | ToolCallArguments
    | Finish
    | Usage
)


class Renderer(Protocol):
    """One reply in one protocol. The server pushes every delta; a stream sends what start, push and end return,
    a plain reply sends `body()` after the last push."""

    def start(self) -> list[bytes]: ...

    def push(self, delta: Delta) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...

    def fail(self, error: Exception) -> list[bytes]:
        """The stream breaks after it began: the protocol's error event, and its ending."""
        ...

    def body(self) -> dict[str, Any]: ...
