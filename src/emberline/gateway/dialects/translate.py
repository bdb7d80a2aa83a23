"""Translates requests, unstreamed replies and streams from one wire format into another.

    body, changes = translate_request(body, client, provider, TargetModel(model))
    context = read_reply_context(body, client)        # what rendering the reply needs from the request
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
from emberline.gateway.dialects import deltas
from emberline.gateway.dialects.adapt import adapt
from emberline.gateway.dialects.anthropic import reader as anthropic_reader
from emberline.gateway.dialects.anthropic import reply as anthropic_reply
from emberline.gateway.dialects.anthropic import request as anthropic_request
from emberline.gateway.dialects.anthropic import writer as anthropic_writer
from emberline.gateway.dialects.asked import Asked, asked_of
from emberline.gateway.dialects.changes import Changed, Changes
from emberline.gateway.dialects.chat import reader as chat_reader
from emberline.gateway.dialects.chat import reply as chat_reply
from emberline.gateway.dialects.chat import request as chat_request
from emberline.gateway.dialects.chat import writer as chat_writer
from emberline.gateway.dialects.events import EventSplitter
from emberline.gateway.dialects.gemini import reader as gemini_reader
from emberline.gateway.dialects.gemini import reply as gemini_reply
from emberline.gateway.dialects.gemini import request as gemini_request
from emberline.gateway.dialects.gemini import writer as gemini_writer
from emberline.gateway.dialects.inner import Answer, Conversation, Json, Spoken
from emberline.gateway.dialects.order import Order
from emberline.gateway.dialects.problems import translate_error
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.dialects.responses import reader as responses_reader
from emberline.gateway.dialects.responses import reply as responses_reply
from emberline.gateway.dialects.responses import request as responses_request
from emberline.gateway.dialects.responses import writer as responses_writer
from emberline.gateway.errors import Broken

__all__ = [
    "Asked",
    "Changed",
    "Recipient",
    "StreamTranslator",
    "asked_of",
    "translate_error",
    "translate_reply",
    "translate_request",
]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The functions that parse and render one wire format."""

    parse: Callable[[Json], Conversation]
    render: Callable[[Conversation, Recipient, Changes], Json]
    parse_reply: Callable[[Json, Changes], Answer]
    render_reply: Callable[[Answer, Asked], Json]
    reader: Callable[[], deltas.Reader]
    writer: Callable[[Asked], deltas.Writer]


GRAMMARS: Mapping[Spoken, Grammar] = {
    "openai-chat": Grammar(
        chat_request.parse,
        chat_request.render,
        chat_reply.parse,
        chat_reply.render,
        chat_reader.Reader,
        chat_writer.Writer,
    ),
    "openai-responses": Grammar(
        responses_request.parse,
        responses_request.render,
        responses_reply.parse,
        responses_reply.render,
        responses_reader.Reader,
        responses_writer.Writer,
    ),
    "anthropic": Grammar(
        anthropic_request.parse,
        anthropic_request.render,
        anthropic_reply.parse,
        anthropic_reply.render,
        anthropic_reader.Reader,
        anthropic_writer.Writer,
    ),
    "gemini": Grammar(
        gemini_request.parse,
        gemini_request.render,
        gemini_reply.parse,
        gemini_reply.render,
        gemini_reader.Reader,
        gemini_writer.Writer,
    ),
}


def translate_request(
    body: bytes, source: Spoken, target: Spoken, target_model: Recipient, *, stream: bool | None = None
) -> tuple[bytes, list[Changed]]:
    """Return the request in wire format `target`, and what was changed.

    `stream` is whether the reply is streamed, for Gemini clients, whose URL says so. Raises InvalidRequest.
    """
    request = GRAMMARS[source].parse(decode(body, Json))
    if stream is not None:
        request.stream = stream
    changes = Changes(source)
    if source != target:
        adapt(request, target, target_model, changes)
    return msgspec.json.encode(GRAMMARS[target].render(request, target_model, changes)), changes.all


def translate_reply(
    body: bytes, source: Spoken, target: Spoken, request: Asked | None = None
) -> tuple[bytes, list[Changed]]:
    """Return the reply in wire format `target`, and what was changed.

    Raises Broken if it is not a reply in the provider's wire format `source`.
    """
    changes = Changes(source)
    try:
        answer = GRAMMARS[source].parse_reply(decode(body, Json), changes)
    except InvalidRequest as error:
        raise Broken(f"the provider's reply does not follow the format {source}: {error.message}") from None
    for choice in answer.choices:
        choice.parts = changes.bare(choice.parts, target)
    return msgspec.json.encode(GRAMMARS[target].render_reply(answer, request or Asked())), changes.all


class StreamTranslator:
    """Translates the bytes of a provider's stream into the client's, wherever the bytes are split.

    A failure raises Broken, or UpstreamFailed for an error event of the provider. `write_error` then returns the output
    so far and the client's error event; the caller decides whether to send that or to try another provider.
    """

    def __init__(self, source: Spoken, target: Spoken, request: Asked | None = None) -> None:
        self._source = source
        self._splitter = EventSplitter()
        self._reader = GRAMMARS[source].reader()
        self._writer = GRAMMARS[target].writer(request or Asked())
        self._order = Order(single=target in ("anthropic", "openai-responses"))
        self._made: list[bytes] = []  # output since the last return
        self.ended = False  # the provider marked its stream as complete

    def push(self, data: bytes) -> bytes:
        for event in self._splitter.push(data):
            if self.ended:
                break  # events after the end are ignored
            for delta in self._reader.read(event):
                self._write(delta)
        return self._taken()

    def end(self) -> bytes:
        """Return the last output when the connection has ended; raise Broken if the stream was incomplete."""
        if not self.ended:
            if self._splitter.unfinished():
                self.push(b"\n\n")  # a last event without the blank line after it
            for delta in self._reader.end():
                self._write(delta)
        if not self.ended:
            raise Broken(f"the {self._source} stream was cut off: the connection ended before its end event")
        return self._taken()

    def fail(self, error: Exception) -> bytes:
        return self._taken() + self._writer.fail(error)

    def _write(self, delta: deltas.Delta) -> None:
        self._order.check(delta)
        self._made.append(self._writer.push(delta))
        self.ended = self.ended or isinstance(delta, deltas.Ended)

    def _taken(self) -> bytes:
        output, self._made = b"".join(self._made), []
        return output
