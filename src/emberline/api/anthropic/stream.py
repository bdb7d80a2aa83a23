"""Writes a reply in Anthropic's protocol: the events of a stream, or the whole message.

message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from emberline.api import sse
from emberline.api.anthropic.content import sign_thinking
from emberline.api.anthropic.request import MessagesCall
from emberline.api.deltas import (
    Delta,
    Finish,
    PromptDelta,
    ReasoningDelta,
    ReplyStart,
    RunningUsage,
    TextDelta,
    TokenIdsDelta,
    TokenUsage,
    ToolCallArguments,
    ToolCallStart,
)
from emberline.api.errors import anthropic_error

# pause_turn: the client may send an aborted reply back to have it continued.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


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
        self._started = ReplyStart(0)
        self._blocks: list[_Block] = []
        self._is_open = False  # whether the last block is open
        self._finish: Finish | None = None
        self._usage: TokenUsage | None = None

    def write_start(self) -> list[bytes]:
        return []  # message_start holds the prompt's token count, so it is sent with ReplyStart

    def write(self, delta: Delta) -> list[bytes]:
        events = self._events(delta)
        return [sse.named_event(event["type"], event) for event in events] if self._call.stream else []

    def write_end(self) -> list[bytes]:
        return [sse.named_event("message_stop", {"type": "message_stop"})]

    def write_error(self, error: Exception) -> list[bytes]:
        return [sse.named_event("error", anthropic_error(error).body)]

    def body(self) -> dict[str, Any]:
        return self._message([block.final_json() for block in self._blocks])

    def _events(self, delta: Delta) -> list[dict[str, Any]]:
        match delta:
            case ReplyStart():
                self._started = delta
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
            case TokenUsage():
                self._usage = delta
                stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
                return [{"type": "message_delta", "delta": stop, "usage": self._usage_json()}]
            case PromptDelta() | RunningUsage() | TokenIdsDelta():
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
            "usage": self._usage_json() | {"service_tier": "standard"},
        }

    def _stop_reason(self) -> str | None:
        if self._finish is None:
            return None
        return "stop_sequence" if self._stop_sequence() is not None else _STOP_REASONS[self._finish.reason]

    def _stop_sequence(self) -> str | None:
        return self._finish.stop_sequence if self._finish is not None and self._finish.reason == "stop" else None

    def _usage_json(self) -> dict[str, Any]:
        """Return the protocol's usage; its input_tokens do not include those read from the cache."""
        usage = self._usage or TokenUsage(self._started.prompt_tokens, 0, self._started.cached_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _tool_input(text: str) -> dict[str, Any]:
    """Return the arguments as an object; empty if max_tokens cut them off."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
