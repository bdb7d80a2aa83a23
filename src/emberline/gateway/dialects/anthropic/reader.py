"""The events of a streamed message of Anthropic's, as deltas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.gateway.dialects.deltas import (
    Counted,
    Delta,
    Ended,
    Finished,
    Opened,
    RefusalPiece,
    Sealed,
    TextPiece,
    ThinkingPiece,
    ToolOpened,
    ToolPiece,
)
from emberline.gateway.dialects.finish import ANTHROPIC
from emberline.gateway.dialects.inner import Json
from emberline.gateway.dialects.problems import raised
from emberline.gateway.errors import Broken
from emberline.gateway.usage import Usage


class _Piece(msgspec.Struct):
    """Of a block, or of the message itself."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    signature: str | None = None
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


_DECODER = msgspec.json.Decoder(_Event)


class Reader:
    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}  # open blocks
        self._slots: dict[int, int] = {}  # block -> call
        self._bare: set[int] = set()  # calls that have no arguments yet
        self._usage = Usage()
        self._finished = False

    def read(self, event: bytes) -> Iterator[Delta]:
        try:
            said = _DECODER.decode(event)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise Broken(f"an event of the stream is not one of Anthropic's: {error}") from None
        if said.type == "content_block_delta" and said.delta is not None:  # nearly all are
            yield from self._piece(said.index, said.delta)
            return
        match said:
            case _Event(type="content_block_start", content_block=_Block() as block):
                yield from self._start(said.index, block)
            case _Event(type="content_block_stop"):
                yield from self._stop(said.index)
            case _Event(type="message_start", message=_Message() as message):
                yield Opened(message.id, message.model)
                yield from self._count(message.usage)
            case _Event(type="message_delta", delta=_Piece() as piece):
                yield from self._finish(piece)
                yield from self._count(said.usage)
            case _Event(type="message_stop"):
                yield Ended()
            case _Event(type="error"):
                raise raised({"error": said.error})
            case _Event(type="content_block_delta" | "content_block_start" | "message_start" | "message_delta"):
                raise Broken(f"an event of the stream has nothing in it: {said.type}")
        # all others, as ping, tell nothing of the reply

    def end(self) -> tuple[Delta, ...]:
        return ()

    def _start(self, index: int, block: _Block) -> Iterator[Delta]:
        if index in self._kinds or index in self._slots:
            raise Broken("a block of the stream opens twice")
        self._kinds[index] = block.type
        match block:
            case _Block(type="text", text=str(text)) if text:
                yield TextPiece(text)
            case _Block(type="thinking", thinking=str(text)) if text:
                yield ThinkingPiece(text)
            case _Block(type="redacted_thinking", data=str(data)):
                yield Sealed(data, "anthropic", redacted=True)
            case _Block(type="tool_use", id=str(id), name=str(name)):
                slot = self._slots[index] = len(self._slots)
                yield ToolOpened(slot, id, name)
                if block.input:
                    yield ToolPiece(slot, msgspec.json.encode(block.input).decode())
                else:
                    self._bare.add(slot)
            case _Block(type="tool_use"):
                raise Broken("a call of the stream has no name")

    def _piece(self, index: int, piece: _Piece) -> Iterator[Delta]:
        kind = self._kinds.get(index)
        if kind is None:
            raise Broken("a piece of the stream belongs to no open block")
        match piece:
            case _Piece(type="text_delta", text=str(text)):
                yield TextPiece(text)
            case _Piece(type="input_json_delta", partial_json=str(text)):
                if text and kind == "tool_use":
                    self._bare.discard(self._slots[index])
                    yield ToolPiece(self._slots[index], text)
            case _Piece(type="thinking_delta", thinking=str(text)):
                yield ThinkingPiece(text)
            case _Piece(type="signature_delta", signature=str(seal)):
                yield Sealed(seal, "anthropic")
            case _Piece(type="text_delta" | "input_json_delta" | "thinking_delta" | "signature_delta"):
                raise Broken(f"a piece of the stream has nothing in it: {piece.type}")

    def _stop(self, index: int) -> Iterator[Delta]:
        if self._kinds.pop(index, None) is None:
            raise Broken("a block of the stream is closed that is not open")
        if (slot := self._slots.get(index)) is not None and slot in self._bare:
            self._bare.discard(slot)
            yield ToolPiece(slot, "{}")

    def _finish(self, piece: _Piece) -> Iterator[Delta]:
        if piece.stop_reason is None or self._finished:
            return
        self._finished = True
        if piece.stop_details and isinstance(why := piece.stop_details.get("explanation"), str):
            yield RefusalPiece(why)
        yield Finished(ANTHROPIC.get(piece.stop_reason, "stop"), piece.stop_sequence)

    def _count(self, said: Json | None) -> Iterator[Delta]:
        if (usage := Usage.read("anthropic", said)) is not None:
            self._usage = self._usage.joined(usage)
            yield Counted(self._usage)
