"""Token counts: builds a provider's request that counts tokens, and translates the reply.

Three wire formats can count: Anthropic's messages/count_tokens, Gemini's :countTokens and OpenAI's
responses/input_tokens. If the provider lacks the client's, the request is translated to one that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.core.unified_endpoints import COUNT_TOKENS_ENDPOINT
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.dialects.translate import translate_request
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.converted_request import ConvertedRequest, convert_request
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.deltas import ChatDialect

GEMINI_ACTION = ":countTokens"
INPUT_TOKENS_ENDPOINT = "responses/input_tokens"
# Formats that can count, in order of preference -> the field of the reply with the count.
_COUNT_FIELDS: Mapping[ChatDialect, str] = {
    "anthropic": "input_tokens",
    "gemini": "totalTokens",
    "openai-responses": "input_tokens",
}
_COUNTED_FIELDS: Mapping[ChatDialect, frozenset[str]] = {
    "anthropic": frozenset({"model", "messages", "system", "tools", "tool_choice", "thinking"}),
    "gemini": frozenset({"contents", "systemInstruction", "tools"}),
    "openai-responses": frozenset(
        {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text"}
    ),
}


def client_dialect(call: GatewayRequest) -> ChatDialect | None:
    """Return the wire format of a request to count tokens, or None for any other request."""
    if not call.is_dialect_endpoint:
        return None
    if call.endpoint == COUNT_TOKENS_ENDPOINT:
        return "anthropic"
    if call.endpoint == INPUT_TOKENS_ENDPOINT:
        return "openai-responses"
    return "gemini" if call.dialect == "gemini" and call.endpoint.endswith(GEMINI_ACTION) else None


def build_count_request(
    call: GatewayRequest, source: ChatDialect, provider: Provider, max_output: int | None
) -> ConvertedRequest:
    """Return the provider's request. Raise InvalidRequest if the provider cannot count tokens."""
    choices = sorted(_COUNT_FIELDS, key=lambda dialect: dialect != source)
    target = next((dialect for dialect in choices if _can_count(provider, dialect, call.model)), None)
    if target is None:
        raise InvalidRequest(
            f"tokens cannot be counted for {call.provider}/{call.model}: the provider has no such endpoint"[:300],
            param="model",
            hint="use a model of Anthropic, Google, OpenAI or the engine, or read `usage` in a reply",
        )
    fields = decode(call.body, Json)
    if target != source:
        fields = _translate_fields(fields, call, source, target, provider, max_output)
    if target == "gemini":
        endpoint = provider.endpoint_for("gemini", call.model, False).rpartition(":")[0] + GEMINI_ACTION
        if isinstance(nested := fields.get("generateContentRequest"), dict):
            fields["generateContentRequest"] = {**nested, "model": f"models/{call.model}"}
    else:
        fields["model"] = call.model
        endpoint = (
            provider.prefix + COUNT_TOKENS_ENDPOINT
            if target == "anthropic"
            else provider.unified_path(INPUT_TOKENS_ENDPOINT, INPUT_TOKENS_ENDPOINT, call.model)
        )
    convert = partial(convert_count, source, target)
    dialect: Dialect = "gemini" if target == "gemini" else "raw"
    return convert_request(call, endpoint, msgspec.json.encode(fields), convert, dialect=dialect)


def _can_count(provider: Provider, dialect: ChatDialect, model: str) -> bool:
    if dialect == "openai-responses":
        return INPUT_TOKENS_ENDPOINT in provider.unified_families
    return provider.supports(dialect, model)


def _translate_fields(
    fields: Json,
    call: GatewayRequest,
    source: ChatDialect,
    target: ChatDialect,
    provider: Provider,
    max_output: int | None,
) -> Json:
    if source == "gemini" and isinstance(nested := fields.get("generateContentRequest"), dict):
        fields = nested
    if source == "anthropic":
        fields = {"max_tokens": 1, **fields}  # required by messages, unknown to count_tokens
    target_model = provider.target_model(call.model, max_output)
    body, _ = translate_request(msgspec.json.encode(fields), source, target, target_model, stream=False)
    counted: Json = decode(body, Json)
    counted = {name: value for name, value in counted.items() if name in _COUNTED_FIELDS[target]}
    if provider.is_gemini_api and counted.keys() - {"contents"}:
        return {"generateContentRequest": counted}
    return counted


def convert_count(source: ChatDialect, target: ChatDialect, body: bytes) -> bytes:
    """Return the provider's reply in the client's wire format. Raise UpstreamBroken if it has no count."""
    try:
        count: Any = msgspec.json.decode(body, type=dict).get(_COUNT_FIELDS[target])
    except JSON_DECODE_ERRORS:
        count = None
    if type(count) is not int:
        raise UpstreamBroken("the provider's reply has no count of tokens")
    if source == target:
        return body
    reply: Json = {_COUNT_FIELDS[source]: count}
    if source == "openai-responses":
        reply = {"object": "response.input_tokens", **reply}
    return msgspec.json.encode(reply)
