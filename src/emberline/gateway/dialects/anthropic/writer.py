"""Renders deltas as the events of a streamed Anthropic message.

message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop
"""

from __future__ import annotations

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects import signatures
from emberline.gateway.dialects.anthropic.content import safe_tool_id
from emberline.gateway.dialects.anthropic.reply import render_stop
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.errors import render_error
from emberline.wire import deltas, sse
from emberline.wire.citations import render_anthropic_citation
from emberline.wire.deltas import Citation
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage
from emberline.wire.usage_objects import render_anthropic_usage

_TEXT_DELTA = b'"text_delta","text":'
_THINKING_DELTA = b'"thinking_delta","thinking":'
_JSON_DELTA = b'"input_json_delta","partial_json":'
_DELTA_EVENT = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b%b}}\n\n'


class AnthropicEventWriter:
    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._stream_start: deltas.StreamStart | None = None
        self._has_started = False
        self._block_index = -1  # index of the last block
        self._open_kind = ""  # type of the open block, "" if none is open
        self._open_slot = -1  # slot of the open tool call
        self._is_signed = False  # whether the open thinking block has its signature
        self._written_citations: set[bytes] = set()  # citations of the open text block
        self._has_refusal = False
        self._finish: deltas.Finish | None = None
        self._usage = Usage()

    def write(self, delta: deltas.ProviderDelta) -> bytes:
        match delta:
            case deltas.TextDelta():
                return self._append_text("text", _TEXT_DELTA, delta.text)
            case deltas.ToolCallArguments():
                if self._open_kind != "tool_use" or delta.slot != self._open_slot:
                    raise UpstreamBroken("the stream interleaves the arguments of several tool calls")
                return _DELTA_EVENT % (self._block_index, _JSON_DELTA, sse.dumps(delta.text))
            case deltas.ReasoningDelta():
                return self._append_text("thinking", _THINKING_DELTA, delta.text)
            case deltas.RefusalDelta():
                self._has_refusal = True
                return self._append_text("text", _TEXT_DELTA, delta.text)
            case deltas.ToolCallStart():
                self._open_slot = delta.slot
                call = {"id": safe_tool_id(delta.id), "name": delta.name, "input": {}}
                return self._open_block("tool_use", {"type": "tool_use", **call})
            case deltas.SignatureDelta():
                return self._sign_thinking(delta)
            case deltas.CitationDelta():
                return self._add_citation(delta.citation)
            case deltas.StreamStart():
                assert self._stream_start is None, "a stream has one start"
                self._context.set_identity(delta)
                self._stream_start = delta
            case deltas.UsageUpdate():
                self._usage = delta.usage
            case deltas.Finish():
                self._finish = delta
                return self._start_message() + self._close_block()
            case deltas.StreamEnd():
                return self._end()
        return b""

    def write_error(self, error: Exception) -> bytes:
        return sse.named_event("error", render_error(error, "anthropic"))

    def _append_text(self, kind: str, piece: bytes, text: str) -> bytes:
        before = b""
        if self._open_kind != kind or self._is_signed or self._written_citations:
            before = self._open_block(kind, _EMPTY_BLOCKS[kind])
        return before + _DELTA_EVENT % (self._block_index, piece, sse.dumps(text))

    def _sign_thinking(self, delta: deltas.SignatureDelta) -> bytes:
        """Add the signature to the open thinking block, or open an empty one for it."""
        if delta.redacted:
            block = {"type": "redacted_thinking", "data": delta.signature}
            return self._open_block("redacted_thinking", block) + self._close_block()
        before = b""
        if self._open_kind != "thinking" or self._is_signed:
            before = self._open_block("thinking", _EMPTY_BLOCKS["thinking"])
        self._is_signed = True
        signature = signatures.encode_signature(delta.signature, delta.origin, "anthropic")
        return before + _DELTA_EVENT % (self._block_index, b'"signature_delta","signature":', sse.dumps(signature))

    def _add_citation(self, citation: Citation) -> bytes:
        """Add the citation to the open text block; drop it if none is open.

        Later text goes into a new block, because a citation refers to the whole block.
        """
        rendered = sse.dumps(render_anthropic_citation(citation))
        if self._open_kind != "text" or rendered in self._written_citations:
            return b""
        self._written_citations.add(rendered)
        return _DELTA_EVENT % (self._block_index, b'"citations_delta","citation":', rendered)

    def _start_message(self) -> bytes:
        if self._has_started:
            return b""
        assert self._stream_start is not None, "a stream starts before its first content"
        self._has_started = True
        message: Json = {
            "id": self._stream_start.id,
            "type": "message",
            "role": "assistant",
            "model": self._stream_start.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": render_anthropic_usage(self._usage),
        }
        return sse.named_event("message_start", {"type": "message_start", "message": message})

    def _open_block(self, kind: str, block: Json) -> bytes:
        before = self._start_message() + self._close_block()
        self._block_index += 1
        self._open_kind, self._is_signed, self._written_citations = kind, False, set()
        event = {"type": "content_block_start", "index": self._block_index, "content_block": block}
        return before + sse.named_event("content_block_start", event)

    def _close_block(self) -> bytes:
        if not self._open_kind:
            return b""
        self._open_kind = ""
        return sse.named_event("content_block_stop", {"type": "content_block_stop", "index": self._block_index})

    def _end(self) -> bytes:
        assert self._finish is not None and not self._open_kind, "a finish reason precedes the end of the stream"
        reason, sequence = render_stop(self._finish.reason, self._finish.stop_sequence, self._has_refusal)
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        event = {"type": "message_delta", "delta": stop, "usage": render_anthropic_usage(self._usage)}
        return sse.named_event("message_delta", event) + sse.named_event("message_stop", {"type": "message_stop"})


_EMPTY_BLOCKS: dict[str, Json] = {
    "text": {"type": "text", "text": "", "citations": None},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
