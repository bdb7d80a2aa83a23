"""Reads from the events of a stream, in each wire format, what the gateway must know about a reply.

The Struct types name only the fields that are read; decoding skips all others, but checks that they are valid JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from emberline.gateway.call import Dialect
from emberline.gateway.costs.usage import Usage
from emberline.gateway.errors import Broken
from emberline.net.notjson import NOT_JSON


@dataclass(slots=True)
class Signs:
    begun: bool = False  # text, reasoning or a tool call has been received
    ended: bool = False  # the wire format's end event has been received
    finished: bool = False  # a finish reason has been received
    failed: str = ""  # message of an error event
    model: str = ""
    characters: int = 0  # characters of content
    only_usage: bool = False  # whether the last event had usage and no content
    told: list[Any] = field(default_factory=list)  # the first and the last usage object

    def usage(self, dialect: Dialect) -> Usage | None:
        usage: Usage | None = None
        for data in self.told:
            if (read := Usage.read(dialect, data)) is not None:
                usage = read if usage is None else usage.joined(read)
        return usage

    def become(self, other: Signs) -> None:
        for field_info in fields(self):
            setattr(self, field_info.name, getattr(other, field_info.name))

    def counted(self, data: Any) -> None:
        if data:
            self.told = [*self.told[:1], data]

    def came(self, piece: Any) -> None:
        if piece:
            self.begun = True
            self.characters += len(piece if isinstance(piece, str) else msgspec.json.encode(piece))


def _said(error: Any) -> str:
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


class _Chat(msgspec.Struct):
    choices: list[_Choice] | None = None
    model: Any = None
    usage: Any = None
    error: Any = None

    @property
    def content(self) -> bool:
        return bool(self.choices)

    @property
    def usage_object(self) -> Any:
        return self.usage


_CHAT = msgspec.json.Decoder(_Chat)


def chat(name: bytes, payload: bytes, state: Signs) -> None:
    if payload == b"[DONE]":
        if not state.begun and not state.finished:
            raise Broken("the stream ended without any content")
        state.ended = True
        return
    event = _CHAT.decode(payload)
    if event.error is not None or name == b"error":
        state.failed = _said(event.error)
        return
    if event.model and not state.model:
        state.model = str(event.model)
    for choice in event.choices or ():
        if (d := choice.delta) is not None:
            if d.content:
                state.came(d.content)
            else:
                for piece in (d.reasoning_content or d.reasoning, d.tool_calls, d.function_call, d.refusal, d.audio):
                    state.came(piece)
        state.finished |= choice.finish_reason is not None
    if event.usage:
        state.counted(event.usage)
        state.only_usage = not event.choices


# -- OpenAI Responses --------------------------------------------------------------------------------------------------


class _Response(msgspec.Struct):
    model: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None
    status: Any = None

    @property
    def content(self) -> bool:
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


_RESPONSES = msgspec.json.Decoder(_ResponseEvent)
_QUIET = ("message", "reasoning")  # item types that start without content


def responses(name: bytes, payload: bytes, state: Signs) -> None:
    event = _RESPONSES.decode(payload)
    match event.type:
        case str(kind) if kind.endswith(".delta"):
            state.came(event.delta)
        case "response.output_item.added" if event.item is not None and event.item.type not in _QUIET:
            state.begun = True
        case "response.completed" | "response.incomplete":
            state.ended = True
        case "response.failed":
            state.failed = _said(event.response.error if event.response else None)
        case "error":
            state.failed = _said(event.error or {"message": event.message})
        case None:
            raise Broken("an event of the stream has no type")
    if (response := event.response) is not None:
        state.model = state.model or str(response.model or "")
        state.counted(response.usage)


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

    def __post_init__(self) -> None:
        self.content = isinstance(self.content, list)  # an empty list is valid: the model produced nothing


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


_MESSAGES = msgspec.json.Decoder(_MessageEvent)


def messages(name: bytes, payload: bytes, state: Signs) -> None:
    event = _MESSAGES.decode(payload)
    match event.type:
        case "content_block_delta":
            if event.delta is not None:
                for piece in (event.delta.text, event.delta.thinking, event.delta.partial_json):
                    state.came(piece)
        case "content_block_start":
            state.begun |= event.content_block is not None and event.content_block.type not in ("text", "thinking")
        case "message_start" if event.message is not None:
            state.model = str(event.message.model or "")
            state.counted(event.message.usage)
        case "message_delta":
            state.counted(event.usage)
            state.finished = True
        case "message_stop":
            if not state.begun and not state.finished:
                raise Broken("the stream ended without any content")
            state.ended = True
        case "error":
            state.failed = _said(event.error)
        case None:
            raise Broken("an event of the stream has no type")


# -- Gemini ------------------------------------------------------------------------------------------------------------


class _Content(msgspec.Struct):
    parts: list[dict[str, Any]] | None = None


class _Candidate(msgspec.Struct):
    content: _Content | None = None
    finishReason: Any = None


class _Gemini(msgspec.Struct):
    candidates: list[_Candidate] | None = None
    promptFeedback: Any = None
    usageMetadata: Any = None
    modelVersion: Any = None
    error: Any = None

    @property
    def content(self) -> bool:
        return bool(self.candidates or self.promptFeedback)

    @property
    def usage_object(self) -> Any:
        return self.usageMetadata

    @property
    def model(self) -> Any:
        return self.modelVersion


_GEMINI = msgspec.json.Decoder(_Gemini)


def gemini(name: bytes, payload: bytes, state: Signs) -> None:
    event = _GEMINI.decode(payload)
    if event.error is not None:
        state.failed = _said(event.error)
        return
    state.model = state.model or str(event.modelVersion or "")
    for candidate in event.candidates or ():
        for part in (candidate.content.parts if candidate.content else None) or ():
            state.came(part.get("text") if "text" in part else part)
        state.ended |= candidate.finishReason is not None
    if isinstance(event.promptFeedback, dict) and event.promptFeedback.get("blockReason"):
        state.ended = True
    state.counted(event.usageMetadata)


# -- other formats -----------------------------------------------------------------------------------------------------


class _Embeddings(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw(b"")
    model: Any = None
    usage: Any = None
    error: Any = None

    @property
    def content(self) -> bool:
        return len(bytes(self.data)) > 2

    @property
    def usage_object(self) -> Any:
        return self.usage


def raw(name: bytes, payload: bytes, state: Signs) -> None:
    """Observe an event of an unknown format, in which any data counts as content."""
    state.begun = True
    if b'"usage' in payload:
        with contextlib.suppress(*NOT_JSON):
            state.counted(usage_within(msgspec.json.decode(payload)))


def usage_within(data: Any) -> Any:
    """Return the usage object of a reply or event in an unknown format; for a list, the last one."""
    if isinstance(data, list):
        return next(filter(None, map(usage_within, reversed(data))), None)
    objects = (
        [data, *(data.get(name) for name in ("message", "response", "result", "delta"))]
        if isinstance(data, dict)
        else []
    )
    names = ("usage", "usageMetadata", "meta")
    data = (place.get(name) for place in objects if isinstance(place, dict) for name in names)
    return next((usage for usage in data if usage), None)


GAUGES: dict[Dialect, Callable[[bytes, bytes, Signs], None]] = {
    "openai-chat": chat,
    "openai-responses": responses,
    "openai-embeddings": raw,
    "anthropic": messages,
    "gemini": gemini,
    "raw": raw,
}
WHOLE: dict[Dialect, msgspec.json.Decoder[Any]] = {
    "openai-chat": _CHAT,
    "openai-responses": msgspec.json.Decoder(_Response),
    "openai-embeddings": msgspec.json.Decoder(_Embeddings),
    "anthropic": msgspec.json.Decoder(_WholeMessage),
    "gemini": _GEMINI,
}
