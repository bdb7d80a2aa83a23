"""Renders deltas as the events of a streamed Anthropic message.

message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop
"""

from __future__ import annotations

from emberline.api import sse
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import counts, deltas, seals
from emberline.gateway.dialects.anthropic.citations import render
from emberline.gateway.dialects.anthropic.content import tool_id
from emberline.gateway.dialects.anthropic.reply import rendered_stop
from emberline.gateway.dialects.asked import Asked
from emberline.gateway.dialects.inner import Citation, Json
from emberline.gateway.dialects.problems import error_body
from emberline.gateway.errors import Broken

_TEXT = b'"text_delta","text":'
_THOUGHT = b'"thinking_delta","thinking":'
_JSON = b'"input_json_delta","partial_json":'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b%b}}\n\n'


class Writer:
    def __init__(self, context: Asked) -> None:
        self._asked = context
        self._opened: deltas.Opened | None = None
        self._begun = False
        self._index = -1  # index of the last block
        self._kind = ""  # type of the open block, "" if none is open
        self._slot = -1  # slot of the open tool call
        self._signed = False  # whether the open thinking block has its signature
        self._cited: set[bytes] = set()  # citations of the open text block
        self._refused = False
        self._finished: deltas.Finished | None = None
        self._usage = Usage()

    def push(self, delta: deltas.Delta) -> bytes:
        match delta:
            case deltas.TextPiece():
                return self._grow("text", _TEXT, delta.text)
            case deltas.ToolPiece():
                if self._kind != "tool_use" or delta.slot != self._slot:
                    raise Broken("the stream interleaves the arguments of several tool calls")
                return _DELTA % (self._index, _JSON, sse.dumps(delta.text))
            case deltas.ThinkingPiece():
                return self._grow("thinking", _THOUGHT, delta.text)
            case deltas.RefusalPiece():
                self._refused = True
                return self._grow("text", _TEXT, delta.text)
            case deltas.ToolOpened():
                self._slot = delta.slot
                call = {"id": tool_id(delta.id), "name": delta.name, "input": {}}
                return self._open("tool_use", {"type": "tool_use", **call})
            case deltas.Sealed():
                return self._seal(delta)
            case deltas.Cited():
                return self._cite(delta.citation)
            case deltas.Opened():
                assert self._opened is None, "a stream has one start"
                self._asked.name(delta)
                self._opened = delta
            case deltas.Counted():
                self._usage = delta.usage
            case deltas.Finished():
                self._finished = delta
                return self._start() + self._close()
            case deltas.Ended():
                return self._end()
        return b""

    def fail(self, error: Exception) -> bytes:
        return sse.event("error", error_body(error, "anthropic"))

    def _grow(self, kind: str, piece: bytes, text: str) -> bytes:
        before = b""
        if self._kind != kind or self._signed or self._cited:
            before = self._open(kind, _OPENINGS[kind])
        return before + _DELTA % (self._index, piece, sse.dumps(text))

    def _seal(self, sealed: deltas.Sealed) -> bytes:
        """Add the signature to the open thinking block, or open an empty one for it."""
        if sealed.redacted:
            block = {"type": "redacted_thinking", "data": sealed.seal}
            return self._open("redacted_thinking", block) + self._close()
        before = b""
        if self._kind != "thinking" or self._signed:
            before = self._open("thinking", _OPENINGS["thinking"])
        self._signed = True
        signature = seals.shown(sealed.seal, sealed.family, "anthropic")
        return before + _DELTA % (self._index, b'"signature_delta","signature":', sse.dumps(signature))

    def _cite(self, citation: Citation) -> bytes:
        """Add the citation to the open text block; drop it if none is open.

        Later text goes into a new block, because a citation refers to the whole block.
        """
        rendered = sse.dumps(render(citation))
        if self._kind != "text" or rendered in self._cited:
            return b""
        self._cited.add(rendered)
        return _DELTA % (self._index, b'"citations_delta","citation":', rendered)

    def _start(self) -> bytes:
        if self._begun:
            return b""
        assert self._opened is not None, "a stream starts before its first content"
        self._begun = True
        message: Json = {
            "id": self._opened.id,
            "type": "message",
            "role": "assistant",
            "model": self._opened.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts.anthropic(self._usage),
        }
        return sse.event("message_start", {"type": "message_start", "message": message})

    def _open(self, kind: str, block: Json) -> bytes:
        before = self._start() + self._close()
        self._index += 1
        self._kind, self._signed, self._cited = kind, False, set()
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        return before + sse.event("content_block_start", event)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return sse.event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _end(self) -> bytes:
        assert self._finished is not None and not self._kind, "a finish reason precedes the end of the stream"
        reason, sequence = rendered_stop(self._finished.reason, self._finished.stop_sequence, self._refused)
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        event = {"type": "message_delta", "delta": stop, "usage": counts.anthropic(self._usage)}
        return sse.event("message_delta", event) + sse.event("message_stop", {"type": "message_stop"})


_OPENINGS: dict[str, Json] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
