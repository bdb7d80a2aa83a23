"""The deltas of a reply, which each protocol's writer turns into stream events or one plain reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

Reason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token with its log-probability."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None  # None for the first token of a prompt
    top: Sequence[TokenInfo] = ()
    offset: int = 0  # character position of its text, in the prompt or in the generated text


@dataclass(frozen=True, slots=True)
class ReplyStart:
    """The first delta of every reply: the prompt's tokens, known before the first generated token."""

    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunningUsage:
    """Tokens of all choices so far, sent before the deltas they count; only with `running_usage`."""

    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt's text, sent before a choice's first text; only with echo or prompt_logprobs."""

    index: int
    text: str
    tokens: Sequence[TokenInfo] = ()  # only with prompt_logprobs


@dataclass(frozen=True, slots=True)
class TokenIdsDelta:
    """A choice's newest token ids, sent before the deltas made of them; only with return_token_ids."""

    index: int
    ids: Sequence[int]
    prompt_ids: Sequence[int] = ()  # ids of the prompt, with a choice's first tokens


class TextDelta(msgspec.Struct, frozen=True):  # a Struct, not a dataclass: one is created for every event
    index: int  # number of the choice
    text: str
    tokens: Sequence[TokenInfo] = ()  # only with logprobs


class ReasoningDelta(msgspec.Struct, frozen=True):
    index: int
    text: str
    tokens: Sequence[TokenInfo] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    slot: int  # number of the call within the choice, from 0
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    index: int
    slot: int
    text: str  # a further piece of the arguments' JSON text


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; each choice has exactly one."""

    index: int
    reason: Reason
    stop_sequence: str | None = None
    stop_token: int | None = None  # the end token or requested stop token that ended it
    is_requested_stop: bool = False  # `stop_token` is one of the request's stop_token_ids

    def stop_details(self) -> dict[str, str | int | None]:
        """Return vLLM's `stop_reason` (without the model's own end tokens) and SGLang's `matched_stop` (with them)."""
        requested = self.stop_token if self.is_requested_stop else None
        return {
            "stop_reason": requested if self.stop_sequence is None else self.stop_sequence,
            "matched_stop": self.stop_token if self.stop_sequence is None else self.stop_sequence,
        }


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of the whole reply; the last delta, after every choice has finished."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


Delta = (
    ReplyStart
    | RunningUsage
    | PromptDelta
    | TokenIdsDelta
    | TextDelta
    | ReasoningDelta
    | ToolCallStart
    | ToolCallArguments
    | Finish
    | TokenUsage
)


class ReplyWriter(Protocol):
    """Writes one reply in one protocol.

    The server passes every delta to `write`. A stream sends the events that the write methods return; a plain reply
    sends `body()` after the last delta.
    """

    def write_start(self) -> list[bytes]: ...

    def write(self, delta: Delta) -> list[bytes]: ...

    def write_end(self) -> list[bytes]: ...

    def write_error(self, error: Exception) -> list[bytes]:
        """Return the protocol's error event and end of stream, for a stream that has already started."""
        ...

    def body(self) -> dict[str, Any]: ...
