"""The deltas (typed parts) of a reply: the engine generates them, the gateway reads them from providers' streams, and a
writer per wire format renders them. Their order is

StreamStart, { content } ..., Finish, UsageUpdate, StreamEnd, where content is
TextDelta | CitationDelta | ReasoningDelta | SignatureDelta | RefusalDelta | ToolCallStart { ToolCallArguments }

`choice` is the index of the choice. `slot` is the index of the tool call within the choice, from 0 and without gaps.
A UsageUpdate may come at any time and more than once; each holds the reply's total until then. Nothing follows
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

    Where `start` equals `end`, the provider did not say which characters. In a stream the offsets count in the choice's
    whole text.
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
    """The reply's id, model and time; a writer fills in the fields that are empty."""

    id: str = ""
    model: str = ""
    created: int = 0  # Unix time in seconds


class ReplyStart(msgspec.Struct, frozen=True):
    """The engine's first delta, with the number of prompt tokens, before the first token is generated."""

    prompt_tokens: int
    cached_tokens: int = 0


class PromptDelta(msgspec.Struct, frozen=True):
    """The prompt's text, sent before a choice's first text; only with echo or prompt_logprobs."""

    choice: int
    text: str
    tokens: Sequence[TokenInfo] = ()  # only with prompt_logprobs


class TokenIdsDelta(msgspec.Struct, frozen=True):
    """A choice's newest token ids, sent before the deltas made of them; only with return_token_ids."""

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
    """The signature of the reasoning in the deltas before; with `redacted`, encrypted reasoning without text."""

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
    """The end of one choice; each choice has exactly one."""

    reason: FinishReason
    stop_sequence: str | None = None
    choice: int = 0
    stop_token: int | None = None  # of the engine: the end token or requested stop token that ended the choice
    is_requested_stop: bool = False  # `stop_token` is one of the request's stop_token_ids

    def stop_details(self) -> dict[str, str | int | None]:
        """Return vLLM's `stop_reason` (without the model's own end tokens) and SGLang's `matched_stop` (with them)."""
        requested = self.stop_token if self.is_requested_stop else None
        return {
            "stop_reason": requested if self.stop_sequence is None else self.stop_sequence,
            "matched_stop": self.stop_token if self.stop_sequence is None else self.stop_sequence,
        }


class UsageUpdate(msgspec.Struct, frozen=True):
    usage: Usage


class StreamEnd(msgspec.Struct, frozen=True):
    """The end of the reply: the provider marked its stream as complete, or the engine finished every choice."""


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
        """Return the events for the delta, b"" if there are none yet; raise DeltaOrderError if it may not come here."""
        ...

    def write_error(self, error: Exception) -> bytes:
        """Return the wire format's error event and end of stream; b"" if the wire format has none."""
        ...


class ReplyWriter(EventWriter, Protocol):
    """An EventWriter that also takes the deltas of Emberline's engine and can return the whole reply.

    For a request without streaming, `write` returns b"", and `body` returns the reply after the last delta.
    """

    def write(self, delta: Delta) -> bytes: ...

    def body(self) -> Json: ...
