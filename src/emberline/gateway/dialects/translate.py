"""From one dialect into another: requests, whole replies, streams.

    body, changed = translate_request(body, client, provider, Recipient(model))
    asked = asked_of(body, client)                                   what the reply must know of the request
    reply, changed = translate_reply(reply, provider, client, asked)
    stream = StreamTranslator(provider, client, asked); stream.push(data) ... stream.end()

Everything is pure. Where both dialects are the same, bytes need no translation and should pass as they are.
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
    """A dialect: how everything in it is read and written."""

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
    """`stream` is for clients of Gemini's dialect, who say it in the URL. Into the same dialect nothing is lost."""
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
    """`source` is the provider's dialect. What is no reply of it is Broken."""
    changes = Changes(source)
    try:
        answer = GRAMMARS[source].parse_reply(decode(body, Json), changes)
    except InvalidRequest as error:
        raise Broken(f"the reply is not one of {source}: {error.message}") from None
    for choice in answer.choices:
        choice.parts = changes.bare(choice.parts, target)
    return msgspec.json.encode(GRAMMARS[target].render_reply(answer, request or Asked())), changes.all


class StreamTranslator:
    """Bytes of a provider's stream in, bytes of the client's out; cut anywhere, they give the same.

    A fault raises (Broken, or UpstreamFailed if the provider told an error); `fail` then gives what was made before it
    and the client's event for the error. Whoever calls decides whether the client gets that or another provider's try.
    """

    def __init__(self, source: Spoken, target: Spoken, request: Asked | None = None) -> None:
        self._source = source
        self._splitter = EventSplitter()
        self._reader = GRAMMARS[source].reader()
        self._writer = GRAMMARS[target].writer(request or Asked())
        self._order = Order(single=target in ("anthropic", "openai-responses"))
        self._made: list[bytes] = []  # since the last return
        self.ended = False  # the source said that its stream is whole

    def push(self, data: bytes) -> bytes:
        for event in self._splitter.push(data):
            if self.ended:
                break  # what comes after the end is not read
            for delta in self._reader.read(event):
                self._write(delta)
        return self._taken()

    def end(self) -> bytes:
        """No more bytes come."""
        if not self.ended:
            if self._splitter.unfinished():
                self.push(b"\n\n")  # an event whose last line end is missing
            for delta in self._reader.end():
                self._write(delta)
        if not self.ended:
            raise Broken(f"the stream of {self._source} was cut: it has no ending")
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
