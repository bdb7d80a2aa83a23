"""Renders deltas as the reply of Ollama's /api/chat or /api/generate: lines of JSON, or one JSON object.

Each line has a part of the reply. The last line has `"done": true`, the reason, and token counts and durations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from emberline.wire.deltas import (
    Delta,
    Finish,
    Json,
    ReasoningDelta,
    RefusalDelta,
    ReplyStart,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    UsageUpdate,
)
from emberline.wire.errors import render_ollama_error
from emberline.wire.finish_reasons import TO_OLLAMA
from emberline.wire.logprobs import render_chat_logprobs
from emberline.wire.sse import dumps
from emberline.wire.usage import Usage


@dataclass(slots=True)
class OllamaContent:
    """A part of a reply, or the whole reply."""

    text: str = ""
    thinking: str = ""
    tool_calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def append(self, other: OllamaContent) -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.tool_calls += other.tool_calls
        self.logprobs += other.logprobs


def render_chat_fields(content: OllamaContent) -> Json:
    """Return the fields of /api/chat that hold the content."""
    message: Json = {"role": "assistant", "content": content.text}
    if content.thinking:
        message["thinking"] = content.thinking
    if content.tool_calls:
        message["tool_calls"] = content.tool_calls
    return {"message": message}


def render_generate_fields(content: OllamaContent) -> Json:
    """Return the fields of /api/generate that hold the content."""
    thinking = {"thinking": content.thinking} if content.thinking else {}
    return {"response": content.text, **thinking}


def format_time(unix_time: float) -> str:
    """Return a time in the form that Ollama uses, such as 2026-11-19T22:10:05.000000Z."""
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class OllamaWriter:
    def __init__(
        self,
        model: str,
        created: int,
        render_fields: Callable[[OllamaContent], Json],
        *,
        stream: bool,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._head = {"model": model, "created_at": format_time(created)}
        self._render_fields = render_fields
        self._stream = stream
        self._now_ns = now_ns
        self._started_at = self._first_output_at = self._ended_at = 0
        self._usage = Usage()
        self._whole = OllamaContent()  # only without streaming
        self._open_call: ToolCallStart | None = None  # the tool call whose arguments are being generated
        self._arguments: list[str] = []
        self._num_calls = 0
        self._finish: Finish | None = None

    def write(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta() | RefusalDelta():
                return self._add(OllamaContent(delta.text, logprobs=_render_logprobs(delta)))
            case ReasoningDelta():
                return self._add(OllamaContent(thinking=delta.text, logprobs=_render_logprobs(delta)))
            case ToolCallStart():
                before = self._close_call()
                self._open_call = delta
                return before
            case ToolCallArguments():
                self._arguments.append(delta.text)
            case StreamStart():
                self._started_at = self._now_ns()
            case ReplyStart():
                self._first_output_at = self._now_ns()
                self._usage = Usage(input=delta.prompt_tokens, cached_read=delta.cached_tokens)
            case UsageUpdate():
                self._usage = delta.usage
            case Finish():
                self._finish = delta
                return self._close_call()
            case StreamEnd():
                self._ended_at = self._now_ns()
                return self._encode(self._head | self._render_end(OllamaContent()))
            case _:
                raise AssertionError(f"an Ollama reply cannot contain a {type(delta).__name__}")
        return b""

    def write_error(self, error: Exception) -> bytes:
        return dumps(render_ollama_error(error).body) + b"\n"

    def body(self) -> Json:
        self._ended_at = self._ended_at or self._now_ns()
        return self._head | self._render_end(self._whole)

    def _add(self, content: OllamaContent) -> bytes:
        if not self._stream:
            self._whole.append(content)
            return b""
        if not (content.text or content.thinking or content.tool_calls or content.logprobs):
            return b""
        part = self._head | self._render_fields(content) | {"done": False}
        return self._encode(part | ({"logprobs": content.logprobs} if content.logprobs else {}))

    def _close_call(self) -> bytes:
        """Write the open tool call, if there is one. Arguments that a token limit cut off are not valid JSON; such a
        call is left out, because a client would run it with wrong arguments."""
        call, text = self._open_call, "".join(self._arguments)
        self._open_call, self._arguments = None, []
        if call is None:
            return b""
        try:
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return b""
        function = {"index": self._num_calls, "name": call.name, "arguments": arguments}
        self._num_calls += 1
        return self._add(OllamaContent(tool_calls=[{"id": call.id, "function": function}]))

    def _render_end(self, content: OllamaContent) -> Json:
        reason = TO_OLLAMA[self._finish.reason] if self._finish is not None else "stop"
        first = self._first_output_at or self._ended_at
        return {
            **self._render_fields(content),
            "done": True,
            "done_reason": reason,
            **({"logprobs": content.logprobs} if content.logprobs else {}),
            "total_duration": max(1, self._ended_at - self._started_at),
            "load_duration": 0,
            "prompt_eval_count": self._usage.input,
            "prompt_eval_duration": max(1, first - self._started_at),
            "eval_count": self._usage.output,
            "eval_duration": max(1, self._ended_at - first),  # clients divide by it
        }

    def _encode(self, line: Json) -> bytes:
        return dumps(line) + b"\n" if self._stream else b""


def _render_logprobs(delta: TextDelta | RefusalDelta | ReasoningDelta) -> list[Json]:
    return [] if isinstance(delta, RefusalDelta) else render_chat_logprobs(delta.tokens)
