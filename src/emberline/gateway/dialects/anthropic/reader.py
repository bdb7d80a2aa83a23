"""Parses the events of a streamed Anthropic message into deltas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import deltas
from emberline.gateway.dialects.anthropic.citations import parse
from emberline.gateway.dialects.calls import Calls
from emberline.gateway.dialects.citations import known
from emberline.gateway.dialects.events import EventDecoder
from emberline.gateway.dialects.finish import ANTHROPIC
from emberline.gateway.dialects.inner import Json
from emberline.gateway.dialects.problems import raised
from emberline.gateway.errors import Broken


class _Piece(msgspec.Struct):
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
    delta: _Piece | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: Json | None = None
    error: Any = None


_EVENTS = EventDecoder(_Event, "Anthropic's")


class Reader:
    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}  # index -> type
        self._calls = Calls()
        self._told = 0  # characters of text so far
        self._begins = 0  # characters of text before the block
        self._cited: list[Any] = []  # of the block
        self._usage = Usage()
        self._finished = False

    def read(self, event: bytes) -> Iterator[deltas.Delta]:
        decoded = _EVENTS.decode(event)
        if decoded.type == "content_block_delta" and decoded.delta is not None:  # fast path: nearly all events are
            yield from self._piece(decoded.index, decoded.delta)
            return
        match decoded:
            case _Event(type="content_block_start", content_block=_Block() as block):
                yield from self._start(decoded.index, block)
            case _Event(type="content_block_stop"):
                yield from self._stop(decoded.index)
            case _Event(type="message_start", message=_Message() as message):
                yield deltas.Opened(message.id, message.model)
                yield from self._count(message.usage)
            case _Event(type="message_delta", delta=_Piece() as piece):
                yield from self._finish(piece)
                yield from self._count(decoded.usage)
            case _Event(type="message_stop"):
                yield deltas.Ended()
            case _Event(type="error"):
                raise raised({"error": decoded.error})
            case _Event(type="content_block_delta" | "content_block_start" | "message_start" | "message_delta"):
                raise Broken(f"an event of the stream lacks its content: {decoded.type}")
        # All other events, such as ping, are not part of the reply.

    def end(self) -> tuple[deltas.Delta, ...]:
        return ()

    def _start(self, index: int, block: _Block) -> Iterator[deltas.Delta]:
        if index in self._kinds or index in self._calls:
            raise Broken(f"block {index} of the stream is started twice")
        self._kinds[index] = block.type
        self._begins, self._cited = self._told, []
        match block:
            case _Block(type="text", text=str(text)) if text:
                self._told += len(text)
                yield deltas.TextPiece(text)
            case _Block(type="thinking", thinking=str(text)) if text:
                yield deltas.ThinkingPiece(text)
            case _Block(type="redacted_thinking", data=str(data)):
                yield deltas.Sealed(data, "anthropic", redacted=True)
            case _Block(type="tool_use", id=str(id), name=str(name)):
                yield self._calls.open(index, id, name)
                if block.input:
                    yield self._calls.piece(index, msgspec.json.encode(block.input).decode())
            case _Block(type="tool_use"):
                raise Broken(f"tool_use block {index} of the stream has no id or name")

    def _piece(self, index: int, piece: _Piece) -> Iterator[deltas.Delta]:
        kind = self._kinds.get(index)
        if kind is None:
            raise Broken(f"the stream has a delta for block {index}, which is not open")
        match piece:
            case _Piece(type="text_delta", text=str(text)):
                self._told += len(text)
                yield deltas.TextPiece(text)
            case _Piece(type="input_json_delta", partial_json=str(text)):
                if text and kind == "tool_use":
                    yield self._calls.piece(index, text)
            case _Piece(type="thinking_delta", thinking=str(text)):
                yield deltas.ThinkingPiece(text)
            case _Piece(type="signature_delta", signature=str(signature)):
                yield deltas.Sealed(signature, "anthropic")
            case _Piece(type="citations_delta"):
                self._cited.append(
                    piece.citation
                )  # a citation refers to the whole block, so it waits for the block's end
            case _Piece(type="text_delta" | "input_json_delta" | "thinking_delta" | "signature_delta"):
                raise Broken(f"a delta of the stream lacks its content: {piece.type}")

    def _stop(self, index: int) -> Iterable[deltas.Delta]:
        kind = self._kinds.pop(index, None)
        if kind is None:
            raise Broken(f"the stream stops block {index}, which is not open")
        if kind == "tool_use":
            return self._calls.rest(index)
        return map(deltas.Cited, known(self._cited, partial(parse, start=self._begins, end=self._told)))

    def _finish(self, piece: _Piece) -> Iterator[deltas.Delta]:
        if piece.stop_reason is None or self._finished:
            return
        self._finished = True
        if piece.stop_details and isinstance(explanation := piece.stop_details.get("explanation"), str):
            yield deltas.RefusalPiece(explanation)
        yield deltas.Finished(ANTHROPIC.get(piece.stop_reason, "stop"), piece.stop_sequence)

    def _count(self, decoded: Json | None) -> Iterator[deltas.Delta]:
        if (usage := Usage.read("anthropic", decoded)) is not None:
            self._usage = self._usage.joined(usage)
            yield deltas.Counted(self._usage)
