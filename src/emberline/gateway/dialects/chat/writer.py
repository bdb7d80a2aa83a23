"""Renders deltas as the chunks of a streamed chat completion.

Each choice's first chunk has the role, its last the finish_reason; usage, if requested, comes in a separate chunk.
"""

from __future__ import annotations

from typing import Any

from emberline.api import sse
from emberline.gateway.core.usage import Usage
from emberline.gateway.dialects import deltas
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.chat import citations
from emberline.gateway.dialects.chat.content import google_extra_content
from emberline.gateway.dialects.errors import render_error
from emberline.gateway.dialects.finish_reasons import TO_CHAT
from emberline.gateway.dialects.reply_context import ReplyContext
from emberline.gateway.dialects.usage import render_chat_usage

_TEXT_CHUNK = b',"delta":{"content":%b},"logprobs":null,"finish_reason":null}]'
_REASONING_CHUNK = b',"delta":{"reasoning_content":%b},"logprobs":null,"finish_reason":null}]'
_ARGUMENTS_CHUNK = (
    b',"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]},"logprobs":null,"finish_reason":null}]'
)


class ChatEventWriter:
    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._head = b""  # start of every chunk, up to the index of its choice
        self._tail = b',"usage":null}\n\n' if context.include_usage else b"}\n\n"
        self._started_choices: set[int] = set()
        self._signatures: dict[int, str] = {}  # choice -> Gemini's signature of the next tool call
        # choice -> annotations, which are sent once before its end: clients do not join lists of several chunks
        self._annotations: dict[int, list[Json]] = {}
        self._usage: Usage | None = None

    def write(self, delta: deltas.Delta) -> bytes:
        match delta:
            case deltas.TextDelta(logprobs=None):
                return self._chunk(delta.choice, _TEXT_CHUNK % sse.dumps(delta.text))
            case deltas.ToolCallArguments():
                return self._chunk(delta.choice, _ARGUMENTS_CHUNK % (delta.slot, sse.dumps(delta.text)))
            case deltas.ReasoningDelta():
                return self._chunk(delta.choice, _REASONING_CHUNK % sse.dumps(delta.text))
            case deltas.StreamStart():
                self._start_stream(delta)
                return b""
            case deltas.UsageUpdate():
                self._usage = delta.usage
                return b""
            case deltas.SignatureDelta():
                if delta.origin == "gemini":
                    self._signatures[delta.choice] = delta.signature
                return b""
            case deltas.CitationDelta():
                self._annotations.setdefault(delta.choice, []).append(citations.render_citation(delta.citation))
                return b""
            case deltas.Finish() if delta.choice in self._annotations:
                last = self._delta_json({"annotations": self._annotations[delta.choice]})
                return self._chunk(delta.choice, last) + self._chunk(delta.choice, self._render_uncommon_delta(delta))
            case deltas.StreamEnd():
                return self._end()
            case _:
                return self._chunk(delta.choice, self._render_uncommon_delta(delta))

    def write_error(self, error: Exception) -> bytes:
        return sse.data_event(render_error(error, "openai-chat")) + sse.DONE_EVENT

    def _start_stream(self, start: deltas.StreamStart) -> None:
        assert not self._head, "a stream has one start"
        self._context.set_identity(start)
        identity: Json = {"id": start.id, "object": "chat.completion.chunk"}
        identity |= {"created": start.created, "model": start.model}
        self._head = b"data: " + sse.dumps(identity)[:-1] + b',"choices":'

    def _chunk(self, choice: int, rest: bytes) -> bytes:
        if choice in self._started_choices:
            return b'%b[{"index":%d%b%b' % (self._head, choice, rest, self._tail)
        assert self._head, "a stream starts before its first content"
        self._started_choices.add(choice)
        first = self._delta_json({"role": "assistant", "content": ""})
        return self._chunk(choice, first) + self._chunk(choice, rest)

    def _render_uncommon_delta(
        self, delta: deltas.TextDelta | deltas.RefusalDelta | deltas.ToolCallStart | deltas.Finish
    ) -> bytes:
        match delta:
            case deltas.TextDelta():
                return self._delta_json({"content": delta.text}, logprobs={"content": delta.logprobs, "refusal": None})
            case deltas.RefusalDelta():
                return self._delta_json({"refusal": delta.text})
            case deltas.ToolCallStart():
                function = {"name": delta.name, "arguments": ""}
                call: Json = {"index": delta.slot, "id": delta.id, "type": "function", "function": function}
                return self._delta_json(
                    {"tool_calls": [call | google_extra_content(self._signatures.pop(delta.choice, ""))]}
                )
            case deltas.Finish():
                return self._delta_json({}, finish_reason=TO_CHAT[delta.reason])

    @staticmethod
    def _delta_json(delta: Json, **more: Any) -> bytes:
        return b"," + sse.dumps({"delta": delta, "logprobs": None, "finish_reason": None} | more)[1:] + b"]"

    def _end(self) -> bytes:
        if not self._context.include_usage:
            return sse.DONE_EVENT
        usage = None if self._usage is None else render_chat_usage(self._usage)
        return b'%b[],"usage":%b}\n\n%b' % (self._head, sse.dumps(usage), sse.DONE_EVENT)
