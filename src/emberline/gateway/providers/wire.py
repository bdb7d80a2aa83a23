"""Wire: a call as it is put to a provider, and how its reply is to be read. Where the provider speaks the client's
dialect bytes stay as they are, but for the model's name and the wish to be told a stream's usage."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.core.offload import offload
from emberline.gateway.body import edited, peek
from emberline.gateway.call import Call, Dialect
from emberline.gateway.dialects.asked import Asked, asked_of
from emberline.gateway.dialects.inner import Json, Spoken
from emberline.gateway.dialects.prefill import marked
from emberline.gateway.dialects.translate import GRAMMARS, StreamTranslator, translate_reply, translate_request
from emberline.gateway.providers.base import CHANGED, Provider
from emberline.gateway.upstream.outgoing import Outgoing
from emberline.net.notjson import NOT_JSON

TALK: tuple[Spoken, ...] = ("openai-chat", "anthropic", "openai-responses", "gemini")  # can become each other
SHARED = ("content-type", "accept", "user-agent")  # headers that are no provider's own
JSON = "application/json"
LONGEST = 2000  # characters of that header


class Wire(msgspec.Struct, frozen=True):
    out: Outgoing
    dialect: Dialect  # spoken with the provider
    hide_usage: bool = False  # the provider was asked for a stream's usage, the client did not ask
    client: Spoken | None = None  # what the reply becomes; None: it stays as it is
    asked: Asked | None = None

    def translator(self) -> StreamTranslator | None:
        if self.client is None:
            return None
        assert self.dialect in TALK
        return StreamTranslator(self.dialect, self.client, self.asked)

    def whole(self, body: bytes) -> tuple[bytes, str]:
        """A reply as the client is to read it, and what was lost of it."""
        if self.client is None:
            return body, ""
        assert self.dialect in TALK
        return _translated(body, self.dialect, self.client, self.asked)

    async def whole_apart(self, body: bytes) -> tuple[bytes, str]:
        """As `whole`, in another process."""
        if self.client is None:
            return body, ""
        assert self.dialect in TALK
        return await offload.run(len(body), _translated, body, self.dialect, self.client, self.asked)


def _translated(body: bytes, source: Spoken, target: Spoken, asked: Asked | None) -> tuple[bytes, str]:
    result, changed = translate_reply(body, source, target, asked)
    return result, ", ".join(map(str, changed))


async def wired_apart(call: Call, provider: Provider, key: str | None, max_output: int | None, created: int) -> Wire:
    """As `wired`, in another process: for large bodies."""
    bare = call.moved(steps=(), redacted=[], trail=[], surveyed=None)  # with no other body
    wire, notes = await offload.run(len(call.body), _wired_and_notes, bare, provider, key, max_output, created)
    call.notes |= notes
    return wire


def _wired_and_notes(call: Call, *args: Any) -> tuple[Wire, dict[str, str]]:
    return wired(call, *args), call.notes


def wired(call: Call, provider: Provider, key: str | None, max_output: int | None, created: int) -> Wire:
    """`max_output`: what the catalogue says of the model; `created`: now, in seconds since 1970."""
    if provider.speaks(call.dialect, call.model):
        return _as_it_is(call, provider, key)
    source, target = _pair(call, provider)
    body, changed = translate_request(
        call.body, source, target, provider.recipient(call.model, max_output), stream=call.stream
    )
    if changed:
        call.notes[CHANGED] = ", ".join(map(str, changed))
    asked = asked_of(call.body, source, created=created, id=call.id)
    headers = {name: value for name, value in call.headers.items() if name in SHARED} | {"content-type": JSON}
    moved = call.moved(dialect=target, body=body, headers=headers, query="", plain=True)
    wire = _as_it_is(moved, provider, key)
    return Wire(wire.out, wire.dialect, hide_usage=False, client=source, asked=asked)


def _pair(call: Call, provider: Provider) -> tuple[Spoken, Spoken]:
    source = next((each for each in TALK if each == call.dialect), None)
    target = spoken_with(call, provider)
    if source is None or target is None:
        kinds = ", ".join(provider.native) or "nothing that is known here"
        raise InvalidRequest(f"{provider.slug} cannot be asked in {call.dialect}", hint=f"it speaks {kinds}")
    return source, target


def spoken_with(call: Call, provider: Provider) -> Spoken | None:
    """The client's dialect, if the provider speaks it, and otherwise the first that it does."""
    choices = sorted(TALK, key=lambda each: each != call.dialect)
    return next((each for each in choices if provider.speaks(each, call.model)), None)


def _as_it_is(call: Call, provider: Provider, key: str | None) -> Wire:
    changes: dict[str, Any] = {}
    hide = False
    if call.body and (call.plain or (call.stream and call.dialect == "openai-chat")):
        seen = call.seen or peek(call.body)
        if call.plain and call.dialect != "gemini" and seen.model != call.model:
            changes["model"] = call.model
        if call.dialect == "openai-chat" and call.stream and not seen.counts and provider.counts_streams:
            given = seen.stream_options if isinstance(seen.stream_options, dict) else {}
            changes["stream_options"] = {**given, "include_usage": True}
            hide = True
        if call.prefill and call.dialect == "openai-chat":
            changes.update(marked(call.body, call.prefill))
    moved = call.moved(
        endpoint=_endpoint(call, provider) if call.plain else call.endpoint,
        body=edited(call.body, **changes) if changes else call.body,
    )
    return Wire(_put(moved, provider, key), call.dialect, hide)


def _put(call: Call, provider: Provider, key: str | None) -> Outgoing:
    """Who has a way of its own reads what the client wrote, and may not find what it looks for: then the dialect says
    what is wrong with it. If nothing is, the mistake is ours."""
    try:
        return provider.request(call, key)
    except (LookupError, TypeError, AttributeError, *NOT_JSON):
        fields = decode(call.body, Json)
        if (spoken := next((each for each in TALK if each == call.dialect), None)) is not None:
            GRAMMARS[spoken].parse(fields)
        raise


def _endpoint(call: Call, provider: Provider) -> str:
    if call.dialect == "raw":
        return provider.prefix + call.endpoint
    return provider.endpoint_for(call.dialect, call.model, call.stream)


def safe_header(text: str) -> str:
    """A header takes no line breaks, only what latin-1 has, and not too much."""
    if text.isascii() and text.isprintable() and len(text) <= LONGEST:
        return text
    return "".join(c for c in text[:LONGEST] if c.isprintable()).encode("latin-1", "replace").decode("latin-1")
