"""Deltas: the typed parts of a reply, from which each wire format's writer renders the reply.

The engine generates deltas; the gateway reads them from providers' streams. The order of the deltas is

StreamStart, { content } ..., Finish, UsageUpdate, StreamEnd, where content is
TextDelta | CitationDelta | ReasoningDelta | SignatureDelta | RefusalDelta | ToolCallStart { ToolCallArguments }

`choice` is the index of the choice. `slot` is the index of the tool call within the choice, from 0 and without gaps.
A UsageUpdate may come at any time and more than once; each contains the total of the reply so far. Nothing follows
StreamEnd. Only the engine sends ReplyStart, PromptDelta and TokenIdsDelta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, final

import msgspec

from emberline.wire.usage import Usage

ChatDialect = Literal["openai-chat", "openai-responses", "anthropic", "gemini"]
# "abort": the engine ended the choice; "pause": the provider did, and the client may have the reply continued.
FinishReason = Literal["stop", "stop_sequence", "length", "context", "tool_calls", "filter", "pause", "abort"]
EngineFinishReason = Literal["stop", "length", "tool_calls", "abort"]
Json = dict[str, Any]


class TokenInfo(msgspec.Struct, frozen=True):
    """One token with its log-probability."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None  # None for the first token of a prompt
    top: Sequence[TokenInfo] = ()  # the most likely tokens at this position
    offset: int = 0  # character position of its text, in the prompt or in the generated text


class Citation(msgspec.Struct, frozen=True):
    """A web page that supports the characters `start` to `end` (exclusive) of a text.

    If `start` equals `end`, the provider did not report the characters. In a stream, the offsets count from the start
    of the choice's text.
    """

    url: str
    title: str = ""
    quote: str = ""  # text of the page
    start: int = 0
    end: int = 0
    encrypted_index: str = ""  # opaque value that Anthropic requires when the citation is sent back

    def with_offset(self, offset: int) -> Citation:
        return msgspec.structs.replace(self, start=self.start + offset, end=self.end + offset)


class StreamStart(msgspec.Struct):
    """The reply's id, model and creation time; the writer fills in what the provider left empty."""

    id: str = ""
    model: str = ""
    created: int = 0  # Unix time in seconds


class ReplyStart(msgspec.Struct, frozen=True):
    """The engine's first delta, sent before any token is generated; has the number of prompt tokens."""

    prompt_tokens: int
    cached_tokens: int = 0


class PromptDelta(msgspec.Struct, frozen=True):
    """The prompt's text, sent before a choice's first text; only with echo or prompt_logprobs."""

    choice: int
    text: str
    tokens: Sequence[TokenInfo] = ()  # only with prompt_logprobs


class TokenIdsDelta(msgspec.Struct, frozen=True):
    """A choice's newest token ids, sent before the deltas with their text; only with return_token_ids."""

    choice: int
    ids: Sequence[int]
    prompt_ids: Sequence[int] = ()  # ids of the prompt, with a choice's first tokens


@final
class TextDelta(msgspec.Struct, frozen=True):
    text: str
    choice: int = 0
    tokens: Sequence[TokenInfo] = ()  # of the engine, only with logprobs
    logprobs: list[Json] | None = None  # of a provider, in the format of OpenAI's chat


class CitationDelta(msgspec.Struct, frozen=True):
    """A citation of text that came in earlier deltas."""

    citation: Citation
    choice: int = 0


@final
class ReasoningDelta(msgspec.Struct, frozen=True):
    text: str
    choice: int = 0
    tokens: Sequence[TokenInfo] = ()  # of the engine, only with logprobs


class SignatureDelta(msgspec.Struct, frozen=True):
    """The signature of the preceding reasoning or, with `redacted`, encrypted reasoning without text."""

    signature: str
    origin: ChatDialect
    redacted: bool = False
    choice: int = 0


class RefusalDelta(msgspec.Struct, frozen=True):
    text: str
    choice: int = 0


class ToolCallStart(msgspec.Struct, frozen=True):
    slot: int
    id: str
    name: str
    choice: int = 0


@final
class ToolCallArguments(msgspec.Struct, frozen=True):
    slot: int
    text: str  # next fragment of the arguments' JSON text
    choice: int = 0


class Finish(msgspec.Struct, frozen=True):
    """The end of one choice, with its finish reason; sent once per choice."""

    reason: FinishReason
    stop_sequence: str | None = None
    choice: int = 0
    stop_token: int | None = None  # of the engine: the end token or requested stop token that ended the choice
    is_requested_stop: bool = False  # `stop_token` is one of the request's stop_token_ids

    def stop_details(self) -> dict[str, str | int | None]:
        """Return vLLM's `stop_reason` and SGLang's `matched_stop`: the stop sequence or token that matched.

        The model's own end-of-sequence tokens appear only in `matched_stop`.
        """
        requested = self.stop_token if self.is_requested_stop else None
        return {
            "stop_reason": requested if self.stop_sequence is None else self.stop_sequence,
            "matched_stop": self.stop_token if self.stop_sequence is None else self.stop_sequence,
        }


class UsageUpdate(msgspec.Struct, frozen=True):
    usage: Usage


class StreamEnd(msgspec.Struct, frozen=True):
    """The end of the reply: the provider sent its end event, or the engine finished every choice."""


ContentDelta = (
    TextDelta | CitationDelta | ReasoningDelta | SignatureDelta | RefusalDelta | ToolCallStart | ToolCallArguments
)
ProviderDelta = StreamStart | ContentDelta | Finish | UsageUpdate | StreamEnd
Delta = ProviderDelta | ReplyStart | PromptDelta | TokenIdsDelta


class DeltaOrderError(Exception):
    """The deltas come in an order that the wire format cannot express."""


class EventWriter(Protocol):
    """Renders deltas as the events of one stream in one wire format."""

    def write(self, delta: ProviderDelta) -> bytes:
        """Return the delta's events, b"" if there are none yet; raise DeltaOrderError if it is out of order."""
        ...

    def write_error(self, error: Exception) -> bytes:
        """Return the error event and the end of the stream, or b"" if the wire format has no error event."""
        ...


class ReplyWriter(EventWriter, Protocol):
    """An EventWriter that also takes the deltas of Emberline's engine and can return the whole reply.

    For a request without streaming, `write` returns b"", and `body` returns the reply after the last delta.
    """

    def write(self, delta: Delta) -> bytes: ...

    def body(self) -> Json: ...
