"""Renders deltas as the events of a streamed response, in which each item has one part."""

from __future__ import annotations

from collections.abc import Iterable

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.errors import render_error
from emberline.gateway.dialects.responses.namespaces import render_tool_name
from emberline.gateway.dialects.responses.output_items import (
    StreamedFunctionCall,
    StreamedItem,
    StreamedMessage,
    StreamedReasoning,
    StreamedRefusal,
)
from emberline.gateway.dialects.responses.reply import make_item_id, render_response
from emberline.wire import deltas, signatures, sse
from emberline.wire.deltas import Citation
from emberline.wire.finish_reasons import TO_RESPONSES
from emberline.wire.reply_context import ReplyContext
from emberline.wire.usage import Usage

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # HTTP status -> code; all others: server_error


class ResponsesEventWriter:
    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._start: deltas.StreamStart | None = None
        self._items: list[StreamedItem] = []
        self._open_item: StreamedItem | None = None  # the last item, None after it was closed
        self._finish: deltas.Finish | None = None
        self._usage: Usage | None = None
        self._sequence_number = 0

    def write(self, delta: deltas.ProviderDelta) -> bytes:
        if type(delta) is deltas.TextDelta:  # not `match`: isinstance is slow if the Struct type differs
            return self._append_text(StreamedMessage, delta.text, delta.logprobs)
        if type(delta) is deltas.ToolCallArguments:
            if not isinstance(self._open_item, StreamedFunctionCall) or self._open_item.slot != delta.slot:
                raise UpstreamBroken("the stream interleaves the arguments of several tool calls")
            return self._append_to_item(self._open_item, delta.text)
        if type(delta) is deltas.ReasoningDelta:
            return self._append_text(StreamedReasoning, delta.text)
        match delta:
            case deltas.RefusalDelta():
                return self._append_text(StreamedRefusal, delta.text)
            case deltas.ToolCallStart():
                return self._begin_item(
                    StreamedFunctionCall(
                        *self._next_item_position(), delta.slot, delta.id, render_tool_name(delta.name, self._context)
                    )
                )
            case deltas.CitationDelta():
                return self._add_citation(delta.citation)
            case deltas.SignatureDelta():
                return b"" if delta.redacted else self._sign_reasoning(delta)
            case deltas.StreamStart():
                self._set_start(delta)
                event_names = ("response.created", "response.in_progress")
                return self._encode_events(
                    {"type": name, "response": self._render_response("in_progress")} for name in event_names
                )
            case deltas.UsageUpdate():
                self._usage = delta.usage
            case deltas.Finish():
                self._finish = delta
                return self._close_item()
            case deltas.StreamEnd():
                return self._end_stream()
        return b""

    def write_error(self, error: Exception) -> bytes:
        if self._start is None:
            self._set_start(deltas.StreamStart("", ""))
        if self._open_item is not None:
            self._open_item.status = "incomplete"
        code = _ERROR_CODES.get(getattr(error, "status", 500), "server_error")
        rendered = {"code": code, "message": render_error(error, "openai-responses")["error"]["message"]}
        return self._encode_events(
            [{"type": "response.failed", "response": self._render_response("failed", error=rendered)}]
        )

    def _set_start(self, start: deltas.StreamStart) -> None:
        assert self._start is None, "a stream has one start"
        self._context.set_identity(start)
        self._start = start

    def _append_text(
        self,
        kind: type[StreamedMessage | StreamedReasoning | StreamedRefusal],
        text: str,
        logprobs: list[Json] | None = None,
    ) -> bytes:
        before = b""
        if type(self._open_item) is not kind or self._open_item.encrypted_content:
            before = self._begin_item(kind(*self._next_item_position()))
        assert self._open_item is not None
        return before + self._append_to_item(self._open_item, text, logprobs)

    def _append_to_item(self, item: StreamedItem, text: str, logprobs: list[Json] | None = None) -> bytes:
        item.pieces.append(text)
        event = item.encode_delta_event(sse.dumps(text), logprobs, self._sequence_number)
        self._sequence_number += 1
        return event

    def _sign_reasoning(self, delta: deltas.SignatureDelta) -> bytes:
        """Add the signature to the open reasoning item; if none is open, begin a reasoning item without text."""
        before = b""
        if not isinstance(self._open_item, StreamedReasoning) or self._open_item.encrypted_content:
            before = self._begin_item(StreamedReasoning(*self._next_item_position(), has_summary=False))
        assert isinstance(self._open_item, StreamedReasoning)
        self._open_item.encrypted_content = signatures.encode_signature(
            delta.signature, delta.origin, "openai-responses"
        )
        return before

    def _add_citation(self, citation: Citation) -> bytes:
        """Annotate the text item in which the citation starts, even if that item is already closed."""
        texts = [item for item in self._items if type(item) is StreamedMessage]
        for item in texts:
            if citation.start < len(item.text) or item is texts[-1]:
                return self._encode_events([item.add_annotation(citation)])
            citation = citation.with_offset(-len(item.text))
        return b""

    def _next_item_position(self) -> tuple[str, int]:
        assert self._start is not None, "a stream starts before its first content"
        return make_item_id(self._start.id, len(self._items)), len(self._items)

    def _begin_item(self, item: StreamedItem) -> bytes:
        before = self._close_item()
        self._items.append(item)
        self._open_item = item
        return before + self._encode_events(item.make_open_events())

    def _close_item(self) -> bytes:
        if self._open_item is None:
            return b""
        item, self._open_item = self._open_item, None
        return self._encode_events(
            item.make_close_events("incomplete" if self._find_incomplete_reason() else "completed")
        )

    def _find_incomplete_reason(self) -> str | None:
        return TO_RESPONSES[self._finish.reason] if self._finish else None

    def _end_stream(self) -> bytes:
        assert self._finish is not None and self._open_item is None, "a finish reason precedes the end of the stream"
        kind = "response.incomplete" if self._find_incomplete_reason() else "response.completed"
        return self._encode_events([{"type": kind, "response": self._render_response(None)}])

    def _render_response(self, status: str | None, error: Json | None = None) -> Json:
        assert self._start is not None
        items = [item.to_json() for item in self._items]
        return render_response(
            self._start,
            self._context,
            items,
            status=status,
            incomplete_reason=self._find_incomplete_reason(),
            usage=self._usage,
            error=error,
        )

    def _encode_events(self, events: Iterable[Json]) -> bytes:
        encoded = []
        for event in events:
            encoded.append(sse.encode_named_event(event["type"], {**event, "sequence_number": self._sequence_number}))
            self._sequence_number += 1
        return b"".join(encoded)
