"""Builds the provider's HTTP request for a gateway request, and translates the reply back.

Where the provider supports the client's wire format, the body stays unchanged except for the model's name and the field
that requests a stream's usage.
"""

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

TALK: tuple[Spoken, ...] = ("openai-chat", "anthropic", "openai-responses", "gemini")  # translatable into each other
SHARED = ("content-type", "accept", "user-agent")  # client headers that are kept when the request is translated
JSON = "application/json"
LONGEST = 2000  # of a header value that safe_header() returns


class Wire(msgspec.Struct, frozen=True):
    out: Outgoing
    dialect: Dialect  # wire format of the provider
    hide_usage: bool = False  # drop a stream's usage event, which only the gateway requested
    client: Spoken | None = None  # wire format to translate the reply into; None: no translation
    asked: Asked | None = None

    def translator(self) -> StreamTranslator | None:
        if self.client is None:
            return None
        assert self.dialect in TALK
        return StreamTranslator(self.dialect, self.client, self.asked)

    def whole(self, body: bytes) -> tuple[bytes, str]:
        """Return an unstreamed reply in the client's wire format, and a description of what was lost."""
        if self.client is None:
            return body, ""
        assert self.dialect in TALK
        return _translated(body, self.dialect, self.client, self.asked)

    async def whole_apart(self, body: bytes) -> tuple[bytes, str]:
        """Do what `convert_reply` does in a child process, for a large body."""
        if self.client is None:
            return body, ""
        assert self.dialect in TALK
        return await offload.run(len(body), _translated, body, self.dialect, self.client, self.asked)


def _translated(body: bytes, source: Spoken, target: Spoken, asked: Asked | None) -> tuple[bytes, str]:
    result, changed = translate_reply(body, source, target, asked)
    return result, ", ".join(map(str, changed))


async def wired_apart(call: Call, provider: Provider, key: str | None, max_output: int | None, created: int) -> Wire:
    """Do what `build_provider_call` does in a child process, for a large body."""
    bare = call.moved(steps=(), redacted=[], trail=[], surveyed=None)  # without the bodies that are not needed there
    wire, notes = await offload.run(len(call.body), _wired_and_notes, bare, provider, key, max_output, created)
    call.notes |= notes
    return wire


def _wired_and_notes(call: Call, *args: Any) -> tuple[Wire, dict[str, str]]:
    return wired(call, *args), call.notes


def wired(call: Call, provider: Provider, key: str | None, max_output: int | None, created: int) -> Wire:
    """Return the provider call for `call`, translated if the provider does not support its wire format.

    `max_output` is the model's limit in tokens from the catalogue, `created` the Unix time in seconds.
    """
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
        kinds = ", ".join(provider.native) or "no known wire format"
        raise InvalidRequest(
            f"provider {provider.slug!r} does not support {call.dialect} requests, and they cannot be translated",
            hint=f"the provider supports {kinds}",
        )
    return source, target


def spoken_with(call: Call, provider: Provider) -> Spoken | None:
    """Return the client's wire format if the provider supports it, else the first one that it supports."""
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
    """Return the provider's HTTP request.

    Some providers read the client's body and fail on an invalid one. Parsing it then raises the InvalidRequest that
    names the field; if the body is valid, the error is a bug and is raised as it is.
    """
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
    """Return `text` as a valid header value: Latin-1, no line breaks, limited length."""
    if text.isascii() and text.isprintable() and len(text) <= LONGEST:
        return text
    return "".join(c for c in text[:LONGEST] if c.isprintable()).encode("latin-1", "replace").decode("latin-1")
