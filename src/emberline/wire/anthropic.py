"""Renders deltas as an Anthropic message: as the events of a stream, or as one JSON reply.

message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from emberline.wire import sse
from emberline.wire.citations import render_anthropic_citation
from emberline.wire.deltas import (
    Citation,
    CitationDelta,
    Delta,
    DeltaOrderError,
    Finish,
    Json,
    ReasoningDelta,
    RefusalDelta,
    ReplyStart,
    SignatureDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageUpdate,
)
from emberline.wire.errors import render_anthropic_error
from emberline.wire.finish_reasons import TO_ANTHROPIC
from emberline.wire.reply_context import ReplyContext
from emberline.wire.signatures import encode_signature
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_anthropic_usage

_INVALID_ID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_-]")
_DELTA_EVENT = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
_DELTA_TYPES = {
    "text": b'"text_delta","text":',
    "thinking": b'"thinking_delta","thinking":',
    "tool_use": b'"input_json_delta","partial_json":',
    "redacted_thinking": b"",  # has no deltas
}
_EMPTY_BLOCKS: dict[str, Json] = {
    "text": {"type": "text", "text": ""},  # without citations: some clients refuse null
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def make_safe_tool_id(id: str) -> str:
    """Return the tool call id with "_" in place of each character that Anthropic rejects."""
    return _INVALID_ID_CHARACTERS.sub("_", id)


def sign_thinking(thinking: str) -> str:
    """Return the engine's signature of a thinking block: a checksum that reveals changes to the text."""
    return hashlib.sha256(thinking.encode()).hexdigest()[:32]


def render_stop_fields(finish: Finish, has_refusal: bool) -> Json:
    """Return the fields stop_reason and stop_sequence. A stop without a known sequence is "end_turn"."""
    if has_refusal:
        return {"stop_reason": "refusal", "stop_sequence": None}
    if finish.reason not in ("stop", "stop_sequence"):
        return {"stop_reason": TO_ANTHROPIC[finish.reason], "stop_sequence": None}
    reason = "end_turn" if finish.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finish.stop_sequence}


def render_message(id: str, model: str, content: list[Json], stop: Json, usage: Json) -> Json:
    head = {"id": id, "type": "message", "role": "assistant", "model": model}
    return {**head, "content": content, **stop, "usage": usage}


class _EngineBlock(msgspec.Struct):
    """A content block of the engine's reply, collected for `AnthropicWriter.body`."""

    start: Json  # the block without content
    pieces: list[str]

    def to_json(self) -> Json:
        text = "".join(self.pieces)
        match self.start["type"]:
            case "text":
                return self.start | {"text": text}
            case "thinking":
                return self.start | {"thinking": text, "signature": sign_thinking(text)}
            case _:
                return self.start | {"input": _parse_tool_input(text)}


class AnthropicWriter:
    def __init__(
        self, context: ReplyContext, *, from_engine: bool = False, shows_thinking: bool = True, stream: bool = True
    ) -> None:
        """`from_engine`: Emberline's engine generates the reply. Then thinking is signed, and `body` may be called."""
        self._context = context
        self._from_engine = from_engine
        self._shows_thinking = shows_thinking
        self._stream = stream
        self._start: StreamStart | None = None
        self._has_started = False  # message_start has been written
        self._block_index = -1  # index of the last block
        # Type of the open block, "" if none is open; "cited text" and "signed thinking" take no more text.
        self._open_kind = ""
        self._delta_head = b""  # start of the open block's next delta, up to its text
        self._open_slot = -1  # slot of the open tool call
        self._written_citations: set[bytes] = set()  # citations of the open text block
        self._blocks: list[_EngineBlock] = []
        self._pieces: list[str] | None = None  # of the open block, only of the engine
        self._has_refusal = False
        self._finish: Finish | None = None
        self._usage = Usage()

    def write(self, delta: Delta) -> bytes:
        if type(delta) is TextDelta:  # not `match`: isinstance is slow if the object is of a different Struct type
            if self._open_kind != "text" or not delta.text or not self._stream:
                return self._append_text("text", delta.text)
            if self._pieces is not None:
                self._pieces.append(delta.text)
            return b"%b%b}}\n\n" % (self._delta_head, sse.dumps(delta.text))
        if type(delta) is ToolCallArguments:
            if self._open_kind != "tool_use" or delta.slot != self._open_slot:
                raise DeltaOrderError("the stream interleaves the arguments of several tool calls")
            return self._append_text("tool_use", delta.text)
        if type(delta) is ReasoningDelta:
            return self._append_text("thinking", delta.text)
        match delta:
            case RefusalDelta():
                self._has_refusal = True
                return self._append_text("text", delta.text)
            case ToolCallStart():
                self._open_slot = delta.slot
                call = {"id": make_safe_tool_id(delta.id), "name": delta.name, "input": {}}
                return self._open_block("tool_use", {"type": "tool_use", **call})
            case SignatureDelta():
                return self._sign_thinking(delta)
            case CitationDelta():
                return self._add_citation(delta.citation)
            case StreamStart():
                assert self._start is None, "a stream has one start"
                self._context.set_identity(delta)
                self._start = delta
            case ReplyStart():
                self._usage = Usage(input=delta.prompt_tokens, cached_read=delta.cached_tokens)
                return self._start_message()
            case UsageUpdate():
                self._usage = delta.usage
            case Finish():
                self._finish = delta
                return self._start_message() + self._close_block()
            case StreamEnd():
                return self._end_stream()
            case _:
                raise AssertionError(f"an Anthropic message cannot contain a {type(delta).__name__}")
        return b""

    def write_error(self, error: Exception) -> bytes:
        return sse.encode_named_event("error", render_anthropic_error(error).body)

    def body(self) -> Json:
        return self._render_message([block.to_json() for block in self._blocks])

    def _append_text(self, kind: str, text: str) -> bytes:
        if self._from_engine and not text:
            return b""
        before = b"" if self._open_kind == kind else self._open_block(kind, _EMPTY_BLOCKS[kind])
        if self._pieces is not None:
            if kind == "thinking" and not self._shows_thinking:
                return before
            self._pieces.append(text)
        return before + b"%b%b}}\n\n" % (self._delta_head, sse.dumps(text)) if self._stream else b""

    def _sign_thinking(self, delta: SignatureDelta) -> bytes:
        """Add the signature to the open thinking block; if none is open, open an empty thinking block."""
        if delta.redacted:
            block = {"type": "redacted_thinking", "data": delta.signature}
            return self._open_block("redacted_thinking", block) + self._close_block()
        before = b"" if self._open_kind == "thinking" else self._open_block("thinking", _EMPTY_BLOCKS["thinking"])
        self._open_kind = "signed thinking"
        signature = encode_signature(delta.signature, delta.origin, "anthropic")
        return before + self._encode_delta_event(b'"signature_delta","signature":', sse.dumps(signature))

    def _add_citation(self, citation: Citation) -> bytes:
        """Add the citation to the open text block; drop it if none is open.

        Later text goes into a new block, because a citation refers to the whole block.
        """
        rendered = sse.dumps(render_anthropic_citation(citation))
        if self._open_kind not in ("text", "cited text") or rendered in self._written_citations:
            return b""
        self._open_kind = "cited text"
        self._written_citations.add(rendered)
        return self._encode_delta_event(b'"citations_delta","citation":', rendered)

    def _encode_delta_event(self, kind: bytes, value: bytes) -> bytes:
        return _DELTA_EVENT % (self._block_index, kind) + value + b"}}\n\n"

    def _start_message(self) -> bytes:
        if self._has_started:
            return b""
        self._has_started = True
        return self._encode_event({"type": "message_start", "message": self._render_message([])})

    def _render_message(self, content: list[Json]) -> Json:
        assert self._start is not None, "a stream starts before its first content"
        usage = render_anthropic_usage(self._usage)
        if self._from_engine:
            usage["service_tier"] = "standard"
        return render_message(self._start.id, self._start.model, content, self._stop_fields(), usage)

    def _stop_fields(self) -> Json:
        if self._finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        return render_stop_fields(self._finish, self._has_refusal)

    def _open_block(self, kind: str, block: Json) -> bytes:
        before = self._start_message() + self._close_block()
        self._block_index += 1
        self._open_kind, self._written_citations = kind, set()
        self._delta_head = _DELTA_EVENT % (self._block_index, _DELTA_TYPES[kind])
        if self._from_engine:
            self._pieces = []
            self._blocks.append(_EngineBlock(block, self._pieces))
        return before + self._encode_event(
            {"type": "content_block_start", "index": self._block_index, "content_block": block}
        )

    def _close_block(self) -> bytes:
        if not self._open_kind:
            return b""
        before = b""
        if self._open_kind == "thinking" and self._pieces is not None:
            signature = {"type": "signature_delta", "signature": sign_thinking("".join(self._pieces))}
            before = self._encode_event({"type": "content_block_delta", "index": self._block_index, "delta": signature})
        self._open_kind = ""
        return before + self._encode_event({"type": "content_block_stop", "index": self._block_index})

    def _end_stream(self) -> bytes:
        assert self._finish is not None and not self._open_kind, "a finish reason precedes the end of the stream"
        usage = render_anthropic_usage(self._usage)
        message_delta = {"type": "message_delta", "delta": self._stop_fields(), "usage": usage}
        return self._encode_event(message_delta) + self._encode_event({"type": "message_stop"})

    def _encode_event(self, event: Json) -> bytes:
        return sse.encode_named_event(event["type"], event) if self._stream else b""


def _parse_tool_input(text: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object, or {} if max_tokens cut them off."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
