"""Translates requests, unstreamed replies and streams from one wire format into another.

    body, changes = translate_request(body, client, provider, TargetModel(model))
    context = read_reply_context(body, client)        # request fields that affect how the reply is written
    reply, changes = translate_reply(reply, provider, client, context)
    stream = StreamTranslator(provider, client, context); stream.push(data) ... stream.end()

Nothing here does I/O. Where both wire formats are the same, bytes should be passed on without translation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.dialects.adapt import adapt_request
from emberline.gateway.dialects.anthropic import reader as anthropic_reader
from emberline.gateway.dialects.anthropic import reply as anthropic_reply
from emberline.gateway.dialects.anthropic import request as anthropic_request
from emberline.gateway.dialects.canonical import CanonicalReply, CanonicalRequest, Json
from emberline.gateway.dialects.change_report import ChangeReport, FieldChange
from emberline.gateway.dialects.chat import reader as chat_reader
from emberline.gateway.dialects.chat import reply as chat_reply
from emberline.gateway.dialects.chat import request as chat_request
from emberline.gateway.dialects.delta_order import DeltaOrderChecker
from emberline.gateway.dialects.errors import translate_error
from emberline.gateway.dialects.event_reader import EventReader
from emberline.gateway.dialects.gemini import reader as gemini_reader
from emberline.gateway.dialects.gemini import reply as gemini_reply
from emberline.gateway.dialects.gemini import request as gemini_request
from emberline.gateway.dialects.gemini import writer as gemini_writer
from emberline.gateway.dialects.reply_context import read_reply_context
from emberline.gateway.dialects.responses import reader as responses_reader
from emberline.gateway.dialects.responses import reply as responses_reply
from emberline.gateway.dialects.responses import request as responses_request
from emberline.gateway.dialects.responses import writer as responses_writer
from emberline.gateway.dialects.target_model import TargetModel
from emberline.wire import deltas
from emberline.wire.anthropic import AnthropicWriter
from emberline.wire.chat import ChatWriter
from emberline.wire.deltas import ChatDialect
from emberline.wire.event_splitter import EventSplitter, read_event_data
from emberline.wire.reply_context import ReplyContext

__all__ = [
    "FieldChange",
    "ReplyContext",
    "StreamTranslator",
    "TargetModel",
    "read_reply_context",
    "translate_error",
    "translate_reply",
    "translate_request",
]


@dataclass(frozen=True, slots=True)
class DialectCodec:
    """The functions and classes that parse and render one wire format."""

    parse_request: Callable[[Json], CanonicalRequest]
    render_request: Callable[[CanonicalRequest, TargetModel, ChangeReport], Json]
    parse_reply: Callable[[Json, ChangeReport], CanonicalReply]
    render_reply: Callable[[CanonicalReply, ReplyContext], Json]
    make_reader: Callable[[], EventReader]
    make_writer: Callable[[ReplyContext], deltas.EventWriter]


CODECS: Mapping[ChatDialect, DialectCodec] = {
    "openai-chat": DialectCodec(
        chat_request.parse,
        chat_request.render,
        chat_reply.parse,
        chat_reply.render,
        chat_reader.ChatEventReader,
        ChatWriter,
    ),
    "openai-responses": DialectCodec(
        responses_request.parse,
        responses_request.render,
        responses_reply.parse,
        responses_reply.render,
        responses_reader.ResponsesEventReader,
        responses_writer.ResponsesEventWriter,
    ),
    "anthropic": DialectCodec(
        anthropic_request.parse,
        anthropic_request.render,
        anthropic_reply.parse,
        anthropic_reply.render,
        anthropic_reader.AnthropicEventReader,
        AnthropicWriter,
    ),
    "gemini": DialectCodec(
        gemini_request.parse,
        gemini_request.render,
        gemini_reply.parse,
        gemini_reply.render,
        gemini_reader.GeminiEventReader,
        gemini_writer.GeminiEventWriter,
    ),
}


def translate_request(
    body: bytes, source: ChatDialect, target: ChatDialect, target_model: TargetModel, *, stream: bool | None = None
) -> tuple[bytes, list[FieldChange]]:
    """Return the request in wire format `target`, and what was changed.

    `stream`: whether the reply is streamed, which a Gemini request states in its URL. None: as the body states.
    Raises InvalidRequest if the body is invalid or cannot be translated.
    """
    request = CODECS[source].parse_request(decode(body, Json))
    if stream is not None:
        request.stream = stream
    changes = ChangeReport(source)
    if source != target:
        adapt_request(request, target, target_model, changes)
    return msgspec.json.encode(CODECS[target].render_request(request, target_model, changes)), changes.changes


def translate_reply(
    body: bytes, source: ChatDialect, target: ChatDialect, context: ReplyContext | None = None
) -> tuple[bytes, list[FieldChange]]:
    """Return the reply in wire format `target`, and what was changed.

    Raises UpstreamBroken if the body is not a reply in the provider's wire format `source`.
    """
    changes = ChangeReport(source)
    try:
        reply = CODECS[source].parse_reply(decode(body, Json), changes)
    except InvalidRequest as error:
        raise UpstreamBroken(f"the provider's reply does not follow the format {source}: {error.message}") from None
    for choice in reply.choices:
        choice.parts = changes.remove_untranslated_fields(choice.parts, target)
    return msgspec.json.encode(CODECS[target].render_reply(reply, context or ReplyContext())), changes.changes


def write_delta(writer: deltas.EventWriter, delta: deltas.ProviderDelta) -> bytes:
    """Return the delta's events; raise UpstreamBroken if the client's wire format cannot express it."""
    try:
        return writer.write(delta)
    except deltas.DeltaOrderError as error:
        raise UpstreamBroken(str(error)) from None


class StreamTranslator:
    """Translates a provider's stream into the client's wire format. Input may be split at any byte.

    A failure raises UpstreamBroken, or UpstreamFailed for an error event of the provider. `write_error` then returns
    the events that were not returned yet and an error event. The caller either sends these events or tries
    another provider.
    """

    def __init__(self, source: ChatDialect, target: ChatDialect, context: ReplyContext | None = None) -> None:
        self._source = source
        self._splitter = EventSplitter(UpstreamBroken)
        self._reader = CODECS[source].make_reader()
        self._writer = CODECS[target].make_writer(context or ReplyContext())
        self._order_checker = DeltaOrderChecker(single_choice=target in ("anthropic", "openai-responses"))
        self._output: list[bytes] = []  # output since the last return
        self.has_ended = False  # the provider marked its stream as complete

    def push(self, data: bytes) -> bytes:
        for event in self._splitter.push(data):
            if self.has_ended:
                break  # events after the end are ignored
            if payload := read_event_data(event):
                for delta in self._reader.read(payload):
                    self._write(delta)
        return self._take_output()

    def end(self) -> bytes:
        """Return the last events after the connection ended; raise UpstreamBroken for an incomplete stream."""
        if not self.has_ended:
            if self._splitter.partial_event.strip():
                self.push(b"\n\n")  # a last event without the blank line after it
            for delta in self._reader.end():
                self._write(delta)
        if not self.has_ended:
            raise UpstreamBroken(f"the {self._source} stream was cut off: the connection ended before its end event")
        return self._take_output()

    def write_error(self, error: Exception) -> bytes:
        return self._take_output() + self._writer.write_error(error)

    def _write(self, delta: deltas.ProviderDelta) -> None:
        self._order_checker.check(delta)
        self._output.append(write_delta(self._writer, delta))
        self.has_ended = self.has_ended or isinstance(delta, deltas.StreamEnd)

    def _take_output(self) -> bytes:
        output, self._output = b"".join(self._output), []
        return output
