"""Builds the provider's HTTP request for a client's request, and translates the reply back.

If the provider supports the client's wire format, the body is forwarded unchanged. Only the model's name and the field
that requests a stream's usage are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.core.offload import offload
from emberline.gateway.core.assistant_prefill import prefill_fields
from emberline.gateway.core.forms import is_form, replace_form_model
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.core.request_body import read_body_fields, replace_fields
from emberline.gateway.core.unified_endpoints import find_unified_endpoint
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.reply_context import read_reply_context
from emberline.gateway.dialects.translate import CODECS, StreamTranslator, translate_reply, translate_request
from emberline.gateway.providers.base import CHANGED_HEADER, Provider
from emberline.gateway.providers.converted_request import FORWARDED_HEADERS, JSON_CONTENT_TYPE, ConvertedRequest
from emberline.gateway.providers.gemini_embeddings import build_embedding_request, is_embedding_call
from emberline.gateway.providers.token_counts import build_count_request, client_dialect
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.deltas import ChatDialect
from emberline.wire.reply_context import ReplyContext

# The wire formats that can be translated into each other, in order of preference.
CHAT_DIALECTS: tuple[ChatDialect, ...] = ("openai-chat", "anthropic", "openai-responses", "gemini")
MAX_HEADER_CHARACTERS = 2000  # of a header value that safe_header() returns


class ProviderCall(msgspec.Struct, frozen=True):
    """The HTTP request to a provider, and what is needed to translate its reply."""

    request: ProviderRequest
    dialect: Dialect  # wire format of the provider
    hide_usage: bool = False  # drop a stream's usage event, which only the gateway requested
    client_dialect: ChatDialect | None = None  # wire format to translate the reply into; None: no translation
    reply_context: ReplyContext | None = None

    def make_translator(self) -> StreamTranslator | None:
        if self.client_dialect is None:
            return None
        assert self.dialect in CHAT_DIALECTS
        return StreamTranslator(self.dialect, self.client_dialect, self.reply_context)

    def convert_reply(self, body: bytes) -> tuple[bytes, str]:
        """Translate a reply that is not streamed to the client's wire format.

        Return the new body, and a text that lists what the translation left out.
        """
        if self.client_dialect is None:
            return body, ""
        assert self.dialect in CHAT_DIALECTS
        return _translate_reply(body, self.dialect, self.client_dialect, self.reply_context)

    async def convert_reply_offloaded(self, body: bytes) -> tuple[bytes, str]:
        """Run `convert_reply` in a child process, for a large body."""
        if self.client_dialect is None:
            return body, ""
        assert self.dialect in CHAT_DIALECTS
        return await offload.run(
            len(body), _translate_reply, body, self.dialect, self.client_dialect, self.reply_context
        )


class ConvertedCall(ProviderCall, frozen=True, kw_only=True):
    """A call to an endpoint that generates no text. Its reply is not streamed."""

    convert: Callable[[bytes], bytes]

    def convert_reply(self, body: bytes) -> tuple[bytes, str]:
        return self.convert(body), ""

    async def convert_reply_offloaded(self, body: bytes) -> tuple[bytes, str]:
        return await offload.run(len(body), self.convert, body), ""


def _translate_reply(
    body: bytes, source: ChatDialect, target: ChatDialect, context: ReplyContext | None
) -> tuple[bytes, str]:
    result, changed = translate_reply(body, source, target, context)
    return result, ", ".join(map(str, changed))


async def build_provider_call_offloaded(
    call: GatewayRequest, provider: Provider, key: str | None, max_output: int | None, created_s: int
) -> ProviderCall:
    """Run `build_provider_call` in a child process, for a large body."""
    # Other bodies are not needed in the child process.
    reduced_call = call.with_changes(steps=(), redacted_bodies=[], attempts=[], body_summary=None)
    provider_call, reply_headers = await offload.run(
        len(call.body), _build_with_reply_headers, reduced_call, provider, key, max_output, created_s
    )
    call.reply_headers |= reply_headers
    return provider_call


def _build_with_reply_headers(call: GatewayRequest, *args: Any) -> tuple[ProviderCall, dict[str, str]]:
    return build_provider_call(call, *args), call.reply_headers


def build_provider_call(
    call: GatewayRequest, provider: Provider, key: str | None, max_output: int | None, created_s: int
) -> ProviderCall:
    """Return the provider call for `call`.

    The body is translated if the provider needs a different wire format. `max_output` is the model's limit on output
    tokens from the catalogue; `created_s` is the Unix time in seconds.
    """
    if (count_dialect := client_dialect(call)) is not None:
        return _build_converted(build_count_request(call, count_dialect, provider, max_output), provider, key)
    if is_embedding_call(call):
        return _build_converted(build_embedding_request(call, provider), provider, key)
    if provider.supports(call.dialect, call.model):
        return _build_without_translation(call, provider, key)
    source, target = _choose_dialects(call, provider)
    body, changed = translate_request(
        call.body, source, target, provider.target_model(call.model, max_output), stream=call.stream
    )
    if changed:
        call.reply_headers[CHANGED_HEADER] = ", ".join(map(str, changed))
    context = read_reply_context(call.body, source, created=created_s, id=call.id)
    headers = {name: value for name, value in call.headers.items() if name in FORWARDED_HEADERS} | {
        "content-type": JSON_CONTENT_TYPE
    }
    changed_call = call.with_changes(dialect=target, body=body, headers=headers, query="", is_dialect_endpoint=True)
    provider_call = _build_without_translation(changed_call, provider, key)
    return ProviderCall(
        provider_call.request, provider_call.dialect, hide_usage=False, client_dialect=source, reply_context=context
    )


def _build_converted(converted: ConvertedRequest, provider: Provider, key: str | None) -> ConvertedCall:
    request = _build_request(converted.call, provider, key)
    return ConvertedCall(request, converted.reply_dialect, convert=converted.convert)


def _choose_dialects(call: GatewayRequest, provider: Provider) -> tuple[ChatDialect, ChatDialect]:
    source = next((dialect for dialect in CHAT_DIALECTS if dialect == call.dialect), None)
    target = choose_dialect(call, provider)
    if source is None or target is None:
        supported = ", ".join(provider.endpoints) or "no known wire format"
        raise InvalidRequest(
            f"provider {provider.slug!r} does not support {call.dialect} requests, and they cannot be translated",
            hint=f"the provider supports {supported}",
        )
    return source, target


def choose_dialect(call: GatewayRequest, provider: Provider) -> ChatDialect | None:
    """Return the client's wire format if the provider supports it, else a format to translate to.

    Return None if the provider supports no chat format.
    """
    choices = sorted(CHAT_DIALECTS, key=lambda dialect: dialect != call.dialect)
    return next((dialect for dialect in choices if provider.supports(dialect, call.model)), None)


def _build_without_translation(call: GatewayRequest, provider: Provider, key: str | None) -> ProviderCall:
    changes: dict[str, Any] = {}
    hide_usage = False
    if is_form(call.headers.get("content-type", "")) and call.is_dialect_endpoint:
        call = _replace_form_model(call)
    elif call.body and (call.is_dialect_endpoint or (call.stream and call.dialect == "openai-chat")):
        body_fields = call.body_fields or read_body_fields(call.body)
        names_model = call.dialect != "gemini" and bool(call.model)
        if call.is_dialect_endpoint and names_model and body_fields.model != call.model:
            changes["model"] = call.model
        if (
            call.dialect == "openai-chat"
            and call.stream
            and not body_fields.wants_usage
            and provider.supports_include_usage
        ):
            stream_options = body_fields.stream_options if isinstance(body_fields.stream_options, dict) else {}
            changes["stream_options"] = {**stream_options, "include_usage": True}
            hide_usage = True
        if call.prefill and call.dialect == "openai-chat":
            changes.update(prefill_fields(call.body, call.prefill))
    changed_call = call.with_changes(
        endpoint=_provider_endpoint(call, provider) if call.is_dialect_endpoint else call.endpoint,
        body=replace_fields(call.body, **changes) if changes else call.body,
    )
    return ProviderCall(_build_request(changed_call, provider, key), call.dialect, hide_usage)


def _build_request(call: GatewayRequest, provider: Provider, key: str | None) -> ProviderRequest:
    """Return the provider's HTTP request.

    The code of some providers reads the client's body, and fails if the body is invalid. In that case the body is
    parsed strictly, which raises an InvalidRequest that names the invalid field. If the body is valid, the failure is a
    bug, and the original error is raised unchanged.
    """
    try:
        return provider.build_request(call, key)
    except (LookupError, TypeError, AttributeError, *JSON_DECODE_ERRORS):
        fields = decode(call.body, Json)
        if (dialect := next((dialect for dialect in CHAT_DIALECTS if dialect == call.dialect), None)) is not None:
            CODECS[dialect].parse_request(fields)
        raise


def _replace_form_model(call: GatewayRequest) -> GatewayRequest:
    if not call.model:
        return call
    return call.with_changes(body=replace_form_model(call.body, call.headers["content-type"], call.model))


def _provider_endpoint(call: GatewayRequest, provider: Provider) -> str:
    if call.dialect == "raw":
        unified = find_unified_endpoint(call.endpoint)
        assert unified is not None
        return provider.unified_path(call.endpoint, unified.family, call.model)
    return provider.endpoint_for(call.dialect, call.model, call.stream)


def safe_header(text: str) -> str:
    """Return `text` as a valid header value: Latin-1, no line breaks, limited length."""
    if text.isascii() and text.isprintable() and len(text) <= MAX_HEADER_CHARACTERS:
        return text
    return (
        "".join(c for c in text[:MAX_HEADER_CHARACTERS] if c.isprintable())
        .encode("latin-1", "replace")
        .decode("latin-1")
    )
