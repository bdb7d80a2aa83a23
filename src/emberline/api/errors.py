"""An exception as a reply in the shape of each protocol: status, headers, body. Anything not ours is a 500 that tells
nothing of its inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emberline.core.errors import EmberlineError, EngineUnavailable, Overloaded, Unauthorized

UNAVAILABLE_RETRY_AFTER = 2  # seconds: about what an engine takes to come back

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


def openai_error(error: Exception) -> ErrorReply:
    ours = _ours(error)
    kind = _OPENAI_TYPES.get(ours.status, "server_error" if ours.status >= 500 else "invalid_request_error")
    body = {"error": {"message": str(ours), "type": kind, "param": ours.param, "code": ours.code}}
    return ErrorReply(ours.status, body, _headers(ours))


def anthropic_error(error: Exception) -> ErrorReply:
    ours = _ours(error)
    kind = _ANTHROPIC_TYPES.get(ours.status, "api_error" if ours.status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": str(ours)}}
    return ErrorReply(ours.status, body, _headers(ours))


def _ours(error: Exception) -> EmberlineError:
    if isinstance(error, EmberlineError):
        return error
    return EmberlineError("the server made a mistake", hint="its log says more; please report it")


def _headers(error: EmberlineError) -> dict[str, str]:
    match error:
        case Overloaded():
            return {"retry-after": str(error.retry_after)}
        case EngineUnavailable():
            return {"retry-after": str(UNAVAILABLE_RETRY_AFTER)}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
    return {}
