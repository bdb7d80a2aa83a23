"""Renders deltas as the chunks of a streamed chat completion.

Each choice's first chunk has the role, its last the finish_reason; usage, if requested, comes in a separate chunk.
"""

from __future__ import annotations

from typing import Any

from emberline.api import sse
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts, deltas
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.chat import citations
from emberline.gateway.dialects.chat.content import google_extra
from emberline.gateway.dialects.finish import TO_CHAT
from emberline.gateway.dialects.inner import Json
from emberline.gateway.dialects.problems import error_body

_TEXT = b',"delta":{"content":%b},"logprobs":null,"finish_reason":null}]'
_THOUGHT = b',"delta":{"reasoning_content":%b},"logprobs":null,"finish_reason":null}]'
_PIECE = b',"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]},"logprobs":null,"finish_reason":null}]'


class Writer:
    def __init__(self, context: Asked) -> None:
        self._asked = context
        self._head = b""  # start of every chunk, up to the index of its choice
        self._tail = b',"usage":null}\n\n' if context.include_usage else b"}\n\n"
        self._begun: set[int] = set()
        self._seals: dict[int, str] = {}  # choice -> Gemini's signature of the next tool call
        self._cited: dict[
            int, list[Json]
        ] = {}  # choice -> annotations, sent once before its end: clients do not join lists of several chunks
        self._usage: Usage | None = None

    def push(self, delta: deltas.Delta) -> bytes:
        match delta:
            case deltas.TextPiece(logprobs=None):
                return self._chunk(delta.choice, _TEXT % sse.dumps(delta.text))
            case deltas.ToolPiece():
                return self._chunk(delta.choice, _PIECE % (delta.slot, sse.dumps(delta.text)))
            case deltas.ThinkingPiece():
                return self._chunk(delta.choice, _THOUGHT % sse.dumps(delta.text))
            case deltas.Opened():
                self._open(delta)
                return b""
            case deltas.Counted():
                self._usage = delta.usage
                return b""
            case deltas.Sealed():
                if delta.family == "gemini":
                    self._seals[delta.choice] = delta.seal
                return b""
            case deltas.Cited():
                self._cited.setdefault(delta.choice, []).append(citations.render(delta.citation))
                return b""
            case deltas.Finished() if delta.choice in self._cited:
                last = self._said({"annotations": self._cited[delta.choice]})
                return self._chunk(delta.choice, last) + self._chunk(delta.choice, self._rare(delta))
            case deltas.Ended():
                return self._end()
            case _:
                return self._chunk(delta.choice, self._rare(delta))

    def fail(self, error: Exception) -> bytes:
        return sse.data(error_body(error, "openai-chat")) + sse.DONE

    def _open(self, opened: deltas.Opened) -> None:
        assert not self._head, "a stream has one start"
        self._asked.name(opened)
        identity: Json = {"id": opened.id, "object": "chat.completion.chunk"}
        identity |= {"created": opened.created, "model": opened.model}
        self._head = b"data: " + sse.dumps(identity)[:-1] + b',"choices":'

    def _chunk(self, choice: int, rest: bytes) -> bytes:
        if choice in self._begun:
            return b'%b[{"index":%d%b%b' % (self._head, choice, rest, self._tail)
        assert self._head, "a stream starts before its first content"
        self._begun.add(choice)
        first = self._said({"role": "assistant", "content": ""})
        return self._chunk(choice, first) + self._chunk(choice, rest)

    def _rare(self, delta: deltas.TextPiece | deltas.RefusalPiece | deltas.ToolOpened | deltas.Finished) -> bytes:
        match delta:
            case deltas.TextPiece():
                return self._said({"content": delta.text}, logprobs={"content": delta.logprobs, "refusal": None})
            case deltas.RefusalPiece():
                return self._said({"refusal": delta.text})
            case deltas.ToolOpened():
                function = {"name": delta.name, "arguments": ""}
                call: Json = {"index": delta.slot, "id": delta.id, "type": "function", "function": function}
                return self._said({"tool_calls": [call | google_extra(self._seals.pop(delta.choice, ""))]})
            case deltas.Finished():
                return self._said({}, finish_reason=TO_CHAT[delta.reason])

    @staticmethod
    def _said(delta: Json, **more: Any) -> bytes:
        return b"," + sse.dumps({"delta": delta, "logprobs": None, "finish_reason": None} | more)[1:] + b"]"

    def _end(self) -> bytes:
        if not self._asked.include_usage:
            return sse.DONE
        usage = None if self._usage is None else counts.chat(self._usage)
        return b'%b[],"usage":%b}\n\n%b' % (self._head, sse.dumps(usage), sse.DONE)
