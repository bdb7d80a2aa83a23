"""Writes a reply in Anthropic's protocol: the events of a stream, or the whole message.

message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from emberline.api.anthropic.content import sign_thinking
from emberline.api.anthropic.request import MessagesCall
from emberline.wire import sse
from emberline.wire.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    ReplyStart,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageUpdate,
)
from emberline.wire.errors import anthropic_error
from emberline.wire.finish_reasons import TO_ANTHROPIC
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_anthropic_usage


@dataclass(slots=True)
class _Block:
    kind: Literal["text", "thinking", "tool_use"]
    pieces: list[str] = field(default_factory=list)
    slot: int = -1  # of a tool_use block: number of the call
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def start_json(self) -> dict[str, Any]:
        match self.kind:
            case "text":
                return {"type": "text", "text": "", "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "tool_use":
                return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def delta_json(self, text: str) -> dict[str, Any]:
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case "tool_use":
                return {"type": "input_json_delta", "partial_json": text}

    def final_json(self) -> dict[str, Any]:
        match self.kind:
            case "text":
                return self.start_json() | {"text": self.text}
            case "thinking":
                return self.start_json() | {"thinking": self.text, "signature": sign_thinking(self.text)}
            case "tool_use":
                return self.start_json() | {"input": _tool_input(self.text)}


class MessagesReplyWriter:
    def __init__(self, call: MessagesCall, id: str, created: int, fingerprint: str) -> None:
        """`created` and `fingerprint` are not used: all writers have the same parameters."""
        self._call = call
        self._id = id
        self._blocks: list[_Block] = []
        self._is_open = False  # whether the last block is open
        self._finish: Finish | None = None
        self._usage = Usage()

    def write(self, delta: Delta) -> bytes:
        events = self._events(delta)
        return b"".join([sse.named_event(event["type"], event) for event in events]) if self._call.stream else b""

    def write_error(self, error: Exception) -> bytes:
        return sse.named_event("error", anthropic_error(error).body)

    def body(self) -> dict[str, Any]:
        return self._message([block.final_json() for block in self._blocks])

    def _events(self, delta: Delta) -> list[dict[str, Any]]:
        match delta:
            case ReplyStart():
                self._usage = Usage(input=delta.prompt_tokens, cached_read=delta.cached_tokens)
                return [{"type": "message_start", "message": self._message([])}]
            case TextDelta():
                return self._extend("text", delta.text)
            case ReasoningDelta():
                return self._extend("thinking", delta.text)
            case ToolCallStart():
                return self._begin(_Block("tool_use", slot=delta.slot, id=delta.id, name=delta.name))
            case ToolCallArguments():
                assert self._is_open and self._blocks[-1].slot == delta.slot, "tool calls must not overlap"
                return self._extend("tool_use", delta.text)
            case Finish():
                self._finish = delta
                return self._close()
            case UsageUpdate():
                self._usage = delta.usage
                return []
            case StreamStart():
                return []  # message_start holds the prompt's token count, so it is sent with ReplyStart
            case StreamEnd():
                stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
                message_delta = {"type": "message_delta", "delta": stop, "usage": render_anthropic_usage(self._usage)}
                return [message_delta, {"type": "message_stop"}]
            case _:
                raise AssertionError(f"{type(delta).__name__} is not part of this protocol")

    def _extend(self, kind: Literal["text", "thinking", "tool_use"], text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        events = [] if self._is_open and self._blocks[-1].kind == kind else self._begin(_Block(kind))
        if kind == "thinking" and not self._call.shows_thinking:
            return events
        block = self._blocks[-1]
        block.pieces.append(text)
        return [*events, self._delta(block.delta_json(text))]

    def _begin(self, block: _Block) -> list[dict[str, Any]]:
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.start_json()}
        return [*events, start]

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        stop = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        if (block := self._blocks[-1]).kind != "thinking":
            return [stop]
        return [self._delta({"type": "signature_delta", "signature": sign_thinking(block.text)}), stop]

    def _delta(self, piece: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": piece}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.common.model,
            "content": content,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": render_anthropic_usage(self._usage) | {"service_tier": "standard"},
        }

    def _stop_reason(self) -> str | None:
        if self._finish is None:
            return None
        return "stop_sequence" if self._stop_sequence() is not None else TO_ANTHROPIC[self._finish.reason]

    def _stop_sequence(self) -> str | None:
        return self._finish.stop_sequence if self._finish is not None and self._finish.reason == "stop" else None


def _tool_input(text: str) -> dict[str, Any]:
    """Return the arguments as an object; empty if max_tokens cut them off."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
