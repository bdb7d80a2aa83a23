"""Reads usage, errors, model and end of a reply from stream events that are passed on unchanged.

The Struct types declare only the fields that are read. Decoding skips all other fields, but checks that they are valid
JSON. The event readers of `dialects` would decode everything, which is too slow to do for every event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import Dialect
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.usage import Usage


@dataclass(slots=True)
class StreamState:
    """The facts that were read from a stream's events so far: content, errors, usage, model, end."""

    has_content: bool = False  # text, reasoning or a tool call has been received
    has_ended: bool = False  # the wire format's end event has been received
    has_finish_reason: bool = False  # a finish reason has been received
    error: str = ""  # message of an error event
    model: str = ""
    content_characters: int = 0  # characters of content
    last_event_is_usage: bool = False  # whether the last event had usage and no content
    usage_objects: list[Any] = field(default_factory=list)  # the first and the last usage object

    def usage(self, dialect: Dialect) -> Usage | None:
        usage: Usage | None = None
        for data in self.usage_objects:
            if (read := Usage.parse(dialect, data)) is not None:
                usage = read if usage is None else usage.merge_later(read)
        return usage

    def copy_from(self, other: StreamState) -> None:
        for field_info in fields(self):
            setattr(self, field_info.name, getattr(other, field_info.name))

    def add_usage(self, data: Any) -> None:
        if data:
            self.usage_objects = [*self.usage_objects[:1], data]

    def add_content(self, content: Any) -> None:
        if content:
            self.has_content = True
            self.content_characters += len(content if isinstance(content, str) else msgspec.json.encode(content))


def _extract_error_message(error: Any) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"][:500] or "an error without a message"
    return str(error)[:500]


# -- OpenAI Chat Completions -------------------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: Any = None
    message: Any = None  # in an unstreamed reply


class _ChatEvent(msgspec.Struct):
    choices: list[_Choice] | None = None
    model: Any = None
    usage: Any = None
    error: Any = None

    @property
    def has_content(self) -> bool:
        return bool(self.choices)

    @property
    def usage_object(self) -> Any:
        return self.usage


_CHAT_DECODER = msgspec.json.Decoder(_ChatEvent)


def observe_chat_event(name: bytes, payload: bytes, state: StreamState) -> None:
    if payload == b"[DONE]":
        if not state.has_content and not state.has_finish_reason:
            raise UpstreamBroken("the stream ended without any content")
        state.has_ended = True
        return
    event = _CHAT_DECODER.decode(payload)
    if event.error is not None or name == b"error":
        state.error = _extract_error_message(event.error)
        return
    if event.model and not state.model:
        state.model = str(event.model)
    for choice in event.choices or ():
        if (delta := choice.delta) is not None:
            if delta.content:
                state.add_content(delta.content)
            else:
                for piece in (
                    delta.reasoning_content or delta.reasoning,
                    delta.tool_calls,
                    delta.function_call,
                    delta.refusal,
                    delta.audio,
                ):
                    state.add_content(piece)
        state.has_finish_reason |= choice.finish_reason is not None
    if event.usage:
        state.add_usage(event.usage)
        state.last_event_is_usage = not event.choices


# -- OpenAI Responses --------------------------------------------------------------------------------------------------


class _Response(msgspec.Struct):
    model: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None
    status: Any = None

    @property
    def has_content(self) -> bool:
        return isinstance(self.output, list)

    @property
    def usage_object(self) -> Any:
        return self.usage


class _Item(msgspec.Struct):
    type: Any = None


class _ResponseEvent(msgspec.Struct):
    type: Any = None
    delta: Any = None
    response: _Response | None = None
    item: _Item | None = None
    message: Any = None
    error: Any = None


_RESPONSES_DECODER = msgspec.json.Decoder(_ResponseEvent)
_INITIALLY_EMPTY_ITEMS = ("message", "reasoning")  # item types that start without content


def observe_responses_event(name: bytes, payload: bytes, state: StreamState) -> None:
    event = _RESPONSES_DECODER.decode(payload)
    match event.type:
        case str(kind) if kind.endswith(".delta"):
            state.add_content(event.delta)
        case "response.output_item.added" if event.item is not None and event.item.type not in _INITIALLY_EMPTY_ITEMS:
            state.has_content = True
        case "response.completed" | "response.incomplete":
            state.has_ended = True
        case "response.failed":
            state.error = _extract_error_message(event.response.error if event.response else None)
        case "error":
            state.error = _extract_error_message(event.error or {"message": event.message})
        case None:
            raise UpstreamBroken("an event of the stream has no type")
    if (response := event.response) is not None:
        state.model = state.model or str(response.model or "")
        state.add_usage(response.usage)


# -- Anthropic ---------------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    model: Any = None
    usage: Any = None
    content: Any = None
    error: Any = None

    @property
    def usage_object(self) -> Any:
        return self.usage


class _WholeMessage(_Message):
    type: Any = None

    @property
    def has_content(self) -> bool:
        return isinstance(self.content, list)  # an empty list is valid: the model produced nothing


class _BlockDelta(msgspec.Struct):
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    stop_reason: Any = None


class _Block(msgspec.Struct):
    type: Any = None


class _MessageEvent(msgspec.Struct):
    type: Any = None
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _BlockDelta | None = None
    usage: Any = None
    error: Any = None


_MESSAGES_DECODER = msgspec.json.Decoder(_MessageEvent)


def observe_messages_event(name: bytes, payload: bytes, state: StreamState) -> None:
    event = _MESSAGES_DECODER.decode(payload)
    match event.type:
        case "content_block_delta":
            if event.delta is not None:
                for piece in (event.delta.text, event.delta.thinking, event.delta.partial_json):
                    state.add_content(piece)
        case "content_block_start":
            state.has_content |= event.content_block is not None and event.content_block.type not in (
                "text",
                "thinking",
            )
        case "message_start" if event.message is not None:
            state.model = str(event.message.model or "")
            state.add_usage(event.message.usage)
        case "message_delta":
            state.add_usage(event.usage)
            state.has_finish_reason = True
        case "message_stop":
            if not state.has_content and not state.has_finish_reason:
                raise UpstreamBroken("the stream ended without any content")
            state.has_ended = True
        case "error":
            state.error = _extract_error_message(event.error)
        case None:
            raise UpstreamBroken("an event of the stream has no type")


# -- Gemini ------------------------------------------------------------------------------------------------------------


class _Content(msgspec.Struct):
    parts: list[dict[str, Any]] | None = None


class _Candidate(msgspec.Struct):
    content: _Content | None = None
    finishReason: Any = None


class _GeminiEvent(msgspec.Struct):
    candidates: list[_Candidate] | None = None
    promptFeedback: Any = None
    usageMetadata: Any = None
    modelVersion: Any = None
    error: Any = None

    @property
    def has_content(self) -> bool:
        return bool(self.candidates or self.promptFeedback)

    @property
    def usage_object(self) -> Any:
        return self.usageMetadata

    @property
    def model(self) -> Any:
        return self.modelVersion


_GEMINI_DECODER = msgspec.json.Decoder(_GeminiEvent)


def observe_gemini_event(name: bytes, payload: bytes, state: StreamState) -> None:
    event = _GEMINI_DECODER.decode(payload)
    if event.error is not None:
        state.error = _extract_error_message(event.error)
        return
    state.model = state.model or str(event.modelVersion or "")
    for candidate in event.candidates or ():
        for part in (candidate.content.parts if candidate.content else None) or ():
            state.add_content(part.get("text") if "text" in part else part)
        state.has_ended |= candidate.finishReason is not None
    if isinstance(event.promptFeedback, dict) and event.promptFeedback.get("blockReason"):
        state.has_ended = True
    state.add_usage(event.usageMetadata)


# -- other formats -----------------------------------------------------------------------------------------------------


class _Embeddings(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")
    model: Any = None
    usage: Any = None
    error: Any = None

    @property
    def has_content(self) -> bool:
        return len(bytes(self.data)) > 2

    @property
    def usage_object(self) -> Any:
        return self.usage


def observe_raw_event(name: bytes, payload: bytes, state: StreamState) -> None:
    """Update `state` with an event of an unknown wire format, in which any data counts as content."""
    state.has_content = True
    if b'"usage' in payload:
        with contextlib.suppress(*JSON_DECODE_ERRORS):
            state.add_usage(find_usage(msgspec.json.decode(payload)))


def find_usage(data: Any) -> Any:
    """Return the usage object in a reply or event of an unknown format; the last one if `data` is a list."""
    if isinstance(data, list):
        return next(filter(None, map(find_usage, reversed(data))), None)
    objects = (
        [data, *(data.get(name) for name in ("message", "response", "result", "delta"))]
        if isinstance(data, dict)
        else []
    )
    names = ("usage", "usageMetadata", "meta")
    candidates = (container.get(name) for container in objects if isinstance(container, dict) for name in names)
    return next((usage for usage in candidates if usage), None)


EVENT_OBSERVERS: dict[Dialect, Callable[[bytes, bytes, StreamState], None]] = {
    "openai-chat": observe_chat_event,
    "openai-responses": observe_responses_event,
    "openai-embeddings": observe_raw_event,
    "anthropic": observe_messages_event,
    "gemini": observe_gemini_event,
    "raw": observe_raw_event,
}
REPLY_DECODERS: dict[Dialect, msgspec.json.Decoder[Any]] = {
    "openai-chat": _CHAT_DECODER,
    "openai-responses": msgspec.json.Decoder(_Response),
    "openai-embeddings": msgspec.json.Decoder(_Embeddings),
    "anthropic": msgspec.json.Decoder(_WholeMessage),
    "gemini": _GEMINI_DECODER,
}
