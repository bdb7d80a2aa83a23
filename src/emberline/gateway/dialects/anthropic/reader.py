"""Parses the events of a streamed Anthropic message into deltas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects.anthropic.citations import parse_citation
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.citations import parse_citations
from emberline.gateway.dialects.errors import make_stream_error
from emberline.gateway.dialects.event_reader import EventDecoder
from emberline.gateway.dialects.tool_call_slots import ToolCallSlots
from emberline.wire import deltas
from emberline.wire.finish_reasons import FROM_ANTHROPIC
from emberline.wire.usage import Usage


class _Delta(msgspec.Struct):
    """The `delta` object of a block or of the message."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    signature: str | None = None
    citation: Any = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: Json | None = None


class _Block(msgspec.Struct):
    type: str
    id: str | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: str | None = None
    input: Any = None


class _Message(msgspec.Struct):
    id: str
    model: str
    usage: Json | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = -1
    delta: _Delta | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: Json | None = None
    error: Any = None


_DECODER = EventDecoder(_Event, "Anthropic's Messages")


class AnthropicEventReader:
    def __init__(self) -> None:
        self._open_blocks: dict[int, str] = {}  # index -> type
        self._calls = ToolCallSlots()
        self._text_length = 0  # characters of text so far
        self._block_offset = 0  # characters of text before the block
        self._block_citations: list[Any] = []  # of the block
        self._usage = Usage()
        self._has_finished = False

    def read(self, event: bytes) -> Iterator[deltas.ProviderDelta]:
        decoded = _DECODER.decode(event)
        if decoded.type == "content_block_delta" and decoded.delta is not None:  # fast path for nearly all events
            yield from self._read_delta(decoded.index, decoded.delta)
            return
        match decoded:
            case _Event(type="content_block_start", content_block=_Block() as block):
                yield from self._start_block(decoded.index, block)
            case _Event(type="content_block_stop"):
                yield from self._stop_block(decoded.index)
            case _Event(type="message_start", message=_Message() as message):
                yield deltas.StreamStart(message.id, message.model)
                yield from self._read_usage(message.usage)
            case _Event(type="message_delta", delta=_Delta() as delta):
                yield from self._read_finish(delta)
                yield from self._read_usage(decoded.usage)
            case _Event(type="message_stop"):
                yield deltas.StreamEnd()
            case _Event(type="error"):
                raise make_stream_error({"error": decoded.error})
            case _Event(type="content_block_delta" | "content_block_start" | "message_start" | "message_delta"):
                raise UpstreamBroken(f"the stream has a {decoded.type} event without the fields that it must have")
        # All other events, such as ping, are not part of the reply.

    def end(self) -> tuple[deltas.ProviderDelta, ...]:
        return ()

    def _start_block(self, index: int, block: _Block) -> Iterator[deltas.ProviderDelta]:
        if index in self._open_blocks or index in self._calls:
            raise UpstreamBroken(f"block {index} of the stream is started twice")
        self._open_blocks[index] = block.type
        self._block_offset, self._block_citations = self._text_length, []
        match block:
            case _Block(type="text", text=str(text)) if text:
                self._text_length += len(text)
                yield deltas.TextDelta(text)
            case _Block(type="thinking", thinking=str(text)) if text:
                yield deltas.ReasoningDelta(text)
            case _Block(type="redacted_thinking", data=str(data)):
                yield deltas.SignatureDelta(data, "anthropic", redacted=True)
            case _Block(type="tool_use", id=str(id), name=str(name)):
                yield self._calls.open(index, id, name)
                if block.input:
                    yield self._calls.add_arguments(index, msgspec.json.encode(block.input).decode())
            case _Block(type="tool_use"):
                raise UpstreamBroken(f"tool_use block {index} of the stream has no id or name")

    def _read_delta(self, index: int, delta: _Delta) -> Iterator[deltas.ProviderDelta]:
        kind = self._open_blocks.get(index)
        if kind is None:
            raise UpstreamBroken(f"the stream has a delta for block {index}, which is not open")
        match delta:
            case _Delta(type="text_delta", text=str(text)):
                self._text_length += len(text)
                yield deltas.TextDelta(text)
            case _Delta(type="input_json_delta", partial_json=str(text)):
                if text and kind == "tool_use":
                    yield self._calls.add_arguments(index, text)
            case _Delta(type="thinking_delta", thinking=str(text)):
                yield deltas.ReasoningDelta(text)
            case _Delta(type="signature_delta", signature=str(signature)):
                yield deltas.SignatureDelta(signature, "anthropic")
            case _Delta(type="citations_delta"):
                # A citation refers to the whole block, so it waits for the block's end.
                self._block_citations.append(delta.citation)
            case _Delta(type="text_delta" | "input_json_delta" | "thinking_delta" | "signature_delta"):
                raise UpstreamBroken(f"the stream has a {delta.type} without the field that it must have")

    def _stop_block(self, index: int) -> Iterable[deltas.ProviderDelta]:
        kind = self._open_blocks.pop(index, None)
        if kind is None:
            raise UpstreamBroken(f"the stream stops block {index}, which is not open")
        if kind == "tool_use":
            return self._calls.close(index)
        return map(
            deltas.CitationDelta,
            parse_citations(
                self._block_citations, partial(parse_citation, start=self._block_offset, end=self._text_length)
            ),
        )

    def _read_finish(self, delta: _Delta) -> Iterator[deltas.ProviderDelta]:
        if delta.stop_reason is None or self._has_finished:
            return
        self._has_finished = True
        if delta.stop_details and isinstance(explanation := delta.stop_details.get("explanation"), str):
            yield deltas.RefusalDelta(explanation)
        yield deltas.Finish(FROM_ANTHROPIC.get(delta.stop_reason, "stop"), delta.stop_sequence)

    def _read_usage(self, usage_object: Json | None) -> Iterator[deltas.ProviderDelta]:
        if (usage := Usage.parse("anthropic", usage_object)) is not None:
            self._usage = self._usage.merge_later(usage)
            yield deltas.UsageUpdate(self._usage)
