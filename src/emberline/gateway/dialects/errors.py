"""Renders errors in every wire format and parses the errors of providers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.errors import EmberlineError
from emberline.gateway.core.errors import UpstreamFailed
from emberline.gateway.dialects.canonical import Json
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.deltas import ChatDialect
from emberline.wire.errors import render_anthropic_error, render_openai_error

_GEMINI_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# HTTP status of an error that names only its type.
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 529,
    "timeout_error": 504,
    "server_error": 500,
    "api_error": 500,
}


@dataclass(frozen=True, slots=True)
class ProviderError:
    message: str
    kind: str = ""
    code: str = ""
    status: int = 0  # HTTP status; 0 if the error has none


class TranslatedError(UpstreamFailed):
    """A provider's error, to be sent to a client whose wire format differs from the provider's."""

    def __init__(self, message: str, *, status: int = 502, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code or self.code

    @staticmethod
    def from_provider_error(provider_error: ProviderError, status: int) -> TranslatedError:
        return TranslatedError(provider_error.message, status=status, code=provider_error.code or provider_error.kind)


def render_error(error: Exception, dialect: str) -> Json:
    if dialect == "anthropic":
        return render_anthropic_error(error).body
    if dialect != "gemini":
        return render_openai_error(error).body
    rendered = render_openai_error(error)  # hides the text of internal exceptions
    status = _GEMINI_STATUS.get(rendered.status, "INTERNAL" if rendered.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": rendered.status, "message": rendered.body["error"]["message"], "status": status}}


def parse_error(body: bytes) -> ProviderError:
    """Parse a provider's error body; the wire format is recognised by the fields that the body has."""
    try:
        data = msgspec.json.decode(body)
    except JSON_DECODE_ERRORS:
        return ProviderError(body[:500].decode(errors="replace") or "the provider sent no error message")
    return parse_error_object(data)


def parse_error_object(data: Any) -> ProviderError:
    if isinstance(data, list) and data:  # Gemini sends a list for streams without alt=sse
        data = data[0]
    if isinstance(data, dict) and isinstance(data.get("errors"), list) and data["errors"] and "error" not in data:
        data = data["errors"][0]  # Cloudflare
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return ProviderError(str(error or "the provider sent no error message")[:500])
    message = error.get("message") or error.get("detail") or "the provider sent no error message"
    kind, code = str(error.get("type") or error.get("status") or ""), error.get("code")
    numeric = code if isinstance(code, int) and 400 <= code < 600 else 0
    text = code if isinstance(code, str) else ""
    return ProviderError(str(message), kind, text, numeric or _STATUS_OF_TYPE.get(kind) or _STATUS_OF_TYPE.get(text, 0))


def make_stream_error(data: Any) -> UpstreamFailed:
    """Return the exception for an error event within a stream."""
    provider_error = parse_error_object(data)
    return TranslatedError.from_provider_error(provider_error, provider_error.status or 502)


def translate_error(body: bytes, status: int, target: ChatDialect) -> bytes:
    """Return a provider's error body rendered in the client's wire format."""
    error: EmberlineError = TranslatedError.from_provider_error(parse_error(body), status)
    return msgspec.json.encode(render_error(error, target))
