"""Parses the events of a streamed response into deltas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.errors import make_stream_error
from emberline.gateway.dialects.event_reader import EventDecoder
from emberline.gateway.dialects.responses.citations import parse_citation
from emberline.gateway.dialects.responses.reply import parse_finish_reason
from emberline.gateway.dialects.tool_call_slots import ToolCallSlots
from emberline.wire import deltas
from emberline.wire.usage import Usage


class _Item(msgspec.Struct):
    type: str
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    encrypted_content: str | None = None


class _Response(msgspec.Struct):
    id: str = ""
    model: str = ""
    created_at: float | None = None
    status: str | None = None
    incomplete_details: Json | None = None
    error: Any = None
    usage: Json | None = None


class _Event(msgspec.Struct):
    type: str
    output_index: int = -1
    content_index: int = -1
    summary_index: int = -1
    delta: Any = None
    logprobs: list[Json] | None = None
    annotation: Any = None
    item: _Item | None = None
    response: _Response | None = None
    # fields of an error event
    code: Any = None
    message: Any = None
    error: Any = None


_DECODER = EventDecoder(_Event, "Responses")


class ResponsesEventReader:
    def __init__(self) -> None:
        self._calls = ToolCallSlots()
        # (item, summary, content) index of the last reasoning delta
        self._reasoning_part: tuple[int, int, int] | None = None
        # (item, content) index of a text part -> characters before it
        self._text_offsets: dict[tuple[int, int], int] = {}
        self._text_length = 0

    def read(self, event: bytes) -> Iterator[deltas.ProviderDelta]:
        if event == b"[DONE]":
            return  # some providers send it, although Responses has no such event
        decoded = _DECODER.decode(event)
        # Fast path: nearly all events are text.
        if decoded.type == "response.output_text.delta" and isinstance(decoded.delta, str):
            self._text_offsets.setdefault((decoded.output_index, decoded.content_index), self._text_length)
            self._text_length += len(decoded.delta)
            yield deltas.TextDelta(decoded.delta, logprobs=decoded.logprobs or None)
            return
        match decoded:
            case _Event(type="response.function_call_arguments.delta", delta=str(text)):
                yield self._calls.add_arguments(decoded.output_index, text)
            case _Event(type="response.reasoning_summary_text.delta" | "response.reasoning_text.delta", delta=str()):
                yield from self._read_reasoning(decoded)
            case _Event(type="response.refusal.delta", delta=str(text)):
                yield deltas.RefusalDelta(text)
            case _Event(type="response.output_text.annotation.added"):
                if (citation := parse_citation(decoded.annotation)) is not None:
                    part_index = (decoded.output_index, decoded.content_index)
                    yield deltas.CitationDelta(
                        citation.with_offset(self._text_offsets.get(part_index, self._text_length))
                    )
            case _Event(type="response.output_item.added", item=_Item() as item):
                yield from self._read_added_item(decoded.output_index, item)
            case _Event(type="response.output_item.done", item=_Item() as item):
                yield from self._read_done_item(decoded.output_index, item)
            case _Event(response=_Response() as response):
                yield from self._read_response(decoded.type, response)
            case _Event(type="error" | "response.failed"):
                raise make_stream_error({"error": decoded.error or {"message": decoded.message, "code": decoded.code}})
            case _Event(type=kind) if kind in _EVENTS_WITH_CONTENT:
                raise UpstreamBroken(f"the stream has a {kind} event without the fields that it must have")
        # All other events repeat content, or belong to server-side tools.

    def end(self) -> tuple[deltas.ProviderDelta, ...]:
        return ()

    def _read_response(self, kind: str, response: _Response) -> Iterator[deltas.ProviderDelta]:
        match kind:
            case "response.created":
                yield deltas.StreamStart(response.id, response.model, int(response.created_at or 0))
            case "response.failed":
                raise make_stream_error({"error": response.error or {"message": "the response failed"}})
            case "response.completed" | "response.incomplete":
                reason = parse_finish_reason(response.status, response.incomplete_details)
                yield deltas.Finish("tool_calls" if reason == "stop" and self._calls else reason)
                if (usage := Usage.parse("openai-responses", response.usage)) is not None:
                    yield deltas.UsageUpdate(usage)
                yield deltas.StreamEnd()

    def _read_reasoning(self, decoded: _Event) -> Iterator[deltas.ProviderDelta]:
        part = (decoded.output_index, decoded.summary_index, decoded.content_index)
        if self._reasoning_part is not None and self._reasoning_part[0] == part[0] and self._reasoning_part != part:
            yield deltas.ReasoningDelta("\n\n")  # between the parts of one item
        self._reasoning_part = part
        yield deltas.ReasoningDelta(decoded.delta)

    def _read_added_item(self, index: int, item: _Item) -> Iterator[deltas.ProviderDelta]:
        if item.type != "function_call":
            return
        if item.call_id is None or item.name is None or index in self._calls:
            raise UpstreamBroken(
                f"tool call {index} of the stream has no call_id or name, or its index is already used"
            )
        yield self._calls.open(index, item.call_id, item.name)

    def _read_done_item(self, index: int, item: _Item) -> Iterator[deltas.ProviderDelta]:
        if item.type == "reasoning" and item.encrypted_content:
            yield deltas.SignatureDelta(item.encrypted_content, "openai-responses")
        elif item.type == "function_call":
            arguments = item.arguments if isinstance(item.arguments, str) else ""
            yield from self._calls.close(index, arguments or "{}")


_EVENTS_WITH_CONTENT = frozenset(
    {
        "response.created",
        "response.completed",
        "response.incomplete",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_text.delta",
        "response.refusal.delta",
        "response.output_item.added",
        "response.output_item.done",
    }
)
