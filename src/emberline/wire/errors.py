"""Renders exceptions as error replies in the format of each protocol: status, headers and body.

An exception that is not an EmberlineError becomes a 500 without details of the server's internals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emberline.core.errors import (
    ContextLengthExceeded,
    EmberlineError,
    EngineUnavailable,
    Overloaded,
    ThreadNotFound,
    Unauthorized,
)

UNAVAILABLE_RETRY_AFTER_S = 2  # about the time that an engine process takes to restart

_OPENAI_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def render_openai_error(error: Exception) -> ErrorReply:
    wrapped = _as_emberline_error(error)
    kind = _OPENAI_TYPES.get(wrapped.status, "server_error" if wrapped.status >= 500 else "invalid_request_error")
    body = {"error": {"message": str(wrapped), "type": kind, "param": wrapped.param, "code": wrapped.code}}
    return ErrorReply(wrapped.status, body, _build_error_headers(wrapped))


def render_anthropic_error(error: Exception) -> ErrorReply:
    wrapped = _as_emberline_error(error)
    kind = _ANTHROPIC_TYPES.get(wrapped.status, "api_error" if wrapped.status >= 500 else "invalid_request_error")
    message = str(wrapped)
    if isinstance(wrapped, ContextLengthExceeded) and wrapped.num_tokens is not None:
        # Anthropic's words, from which Claude Code reads how much of the conversation it must summarise.
        message = f"prompt is too long: {wrapped.num_tokens} tokens > {wrapped.max_tokens} maximum; {message}"
    details = {"details": {"error_code": wrapped.code}} if isinstance(wrapped, ThreadNotFound) else {}
    body = {"type": "error", "error": {"type": kind, "message": message, **details}}
    return ErrorReply(wrapped.status, body, _build_error_headers(wrapped))


def render_ollama_error(error: Exception) -> ErrorReply:
    wrapped = _as_emberline_error(error)
    return ErrorReply(wrapped.status, {"error": str(wrapped)}, _build_error_headers(wrapped))


def _as_emberline_error(error: Exception) -> EmberlineError:
    if isinstance(error, EmberlineError):
        return error
    return EmberlineError("internal server error", hint="the server log has the traceback; please report it")


def _build_error_headers(error: EmberlineError) -> dict[str, str]:
    match error:
        case Overloaded():
            return {"retry-after": str(error.retry_after)}
        case EngineUnavailable():
            return {"retry-after": str(UNAVAILABLE_RETRY_AFTER_S)}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
    return {}
