"""One reply in Anthropic's protocol: the events of a stream, and the message that they add up to.

message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from emberline.api import sse
from emberline.api.anthropic.content import signature
from emberline.api.anthropic.request import Call
from emberline.api.deltas import (
    Delta,
    Finish,
    Progress,
    PromptDelta,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenIds,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from emberline.api.errors import anthropic_error

# An aborted reply can be given back and continued, which is what pause_turn tells the client.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}


@dataclass(slots=True)
class _Block:
    kind: Literal["text", "thinking", "tool_use"]
    pieces: list[str] = field(default_factory=list)
    slot: int = -1  # tool_use: which call it is
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def opening(self) -> dict[str, Any]:
        match self.kind:
            case "text":
                return {"type": "text", "text": "", "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "tool_use":
                return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def piece(self, text: str) -> dict[str, Any]:
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case "tool_use":
                return {"type": "input_json_delta", "partial_json": text}

    def whole(self) -> dict[str, Any]:
        match self.kind:
            case "text":
                return self.opening() | {"text": self.text}
            case "thinking":
                return self.opening() | {"thinking": self.text, "signature": signature(self.text)}
            case "tool_use":
                return self.opening() | {"input": _tool_input(self.text)}


class Renderer:
    def __init__(self, call: Call, id: str, created: int, fingerprint: str) -> None:
        """`created` and `fingerprint` have no place in the protocol; all renderers are made alike."""
        self._call = call
        self._id = id
        self._started = Started(0)
        self._blocks: list[_Block] = []
        self._open = False  # whether the last block is
        self._finish: Finish | None = None
        self._usage: Usage | None = None

    def start(self) -> list[bytes]:
        return []  # message_start tells the prompt's cost, so it waits for Started

    def push(self, delta: Delta) -> list[bytes]:
        events = self._events(delta)
        return [sse.event(event["type"], event) for event in events] if self._call.stream else []

    def end(self) -> list[bytes]:
        return [sse.event("message_stop", {"type": "message_stop"})]

    def fail(self, error: Exception) -> list[bytes]:
        return [sse.event("error", anthropic_error(error).body)]

    def body(self) -> dict[str, Any]:
        return self._message([block.whole() for block in self._blocks])

    def _events(self, delta: Delta) -> list[dict[str, Any]]:
        match delta:
            case Started():
                self._started = delta
                return [{"type": "message_start", "message": self._message([])}]
            case TextDelta():
                return self._extend("text", delta.text)
            case ReasoningDelta():
                return self._extend("thinking", delta.text)
            case ToolCallStart():
                return self._begin(_Block("tool_use", slot=delta.slot, id=delta.id, name=delta.name))
            case ToolCallArguments():
                assert self._open and self._blocks[-1].slot == delta.slot, "calls come one after the other"
                return self._extend("tool_use", delta.text)
            case Finish():
                self._finish = delta
                return self._close()
            case Usage():
                self._usage = delta
                stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
                return [{"type": "message_delta", "delta": stop, "usage": self._counts()}]
            case PromptDelta() | Progress() | TokenIds():
                raise AssertionError("the protocol has no way to ask for it")

    def _extend(self, kind: Literal["text", "thinking", "tool_use"], text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        events = [] if self._open and self._blocks[-1].kind == kind else self._begin(_Block(kind))
        if kind == "thinking" and not self._call.show_thinking:
            return events
        block = self._blocks[-1]
        block.pieces.append(text)
        return [*events, self._delta(block.piece(text))]

    def _begin(self, block: _Block) -> list[dict[str, Any]]:
        events = self._close()
        self._blocks.append(block)
        self._open = True
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.opening()}
        return [*events, start]

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        stop = {"type": "content_block_stop", "index": len(self._blocks) - 1}
        if (block := self._blocks[-1]).kind != "thinking":
            return [stop]
        return [self._delta({"type": "signature_delta", "signature": signature(block.text)}), stop]

    def _delta(self, piece: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": piece}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.caller.model,
            "content": content,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": self._counts() | {"service_tier": "standard"},
        }

    def _stop_reason(self) -> str | None:
        if self._finish is None:
            return None
        return "stop_sequence" if self._stop_sequence() is not None else _STOP_REASONS[self._finish.reason]

    def _stop_sequence(self) -> str | None:
        return self._finish.stop_sequence if self._finish is not None and self._finish.reason == "stop" else None

    def _counts(self) -> dict[str, Any]:
        """Input is what was computed; with what was read from the cache it makes the prompt."""
        usage = self._usage or Usage(self._started.prompt_tokens, 0, self._started.cached_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _tool_input(text: str) -> dict[str, Any]:
    """The arguments as an object; what was cut off in the middle by max_tokens cannot be one, and is left empty."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
