"""Errors in every dialect, and what a provider's error says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.api.errors import anthropic_error, openai_error
from emberline.core.errors import EmberlineError
from emberline.gateway.dialects.inner import Json, Spoken
from emberline.gateway.errors import UpstreamFailed
from emberline.net.notjson import NOT_JSON

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
# What a status means where the error itself does not say it.
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
class Problem:
    message: str
    kind: str = ""
    code: str = ""
    status: int = 0  # 0: it does not say


class TranslatedError(UpstreamFailed):
    """An error that a provider told, on its way to a client of another dialect."""

    def __init__(self, message: str, *, status: int = 502, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code or self.code

    @staticmethod
    def of(problem: Problem, status: int) -> TranslatedError:
        return TranslatedError(problem.message, status=status, code=problem.code or problem.kind)


def error_body(error: Exception, dialect: str) -> Json:
    if dialect == "anthropic":
        return anthropic_error(error).body
    if dialect != "gemini":
        return openai_error(error).body
    data = openai_error(error)  # as text: what is not ours tells nothing of its inside
    status = _GEMINI_STATUS.get(data.status, "INTERNAL" if data.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": data.status, "message": data.body["error"]["message"], "status": status}}


def read_error(body: bytes) -> Problem:
    """Any dialect's: they are told apart by their shape."""
    try:
        data = msgspec.json.decode(body)
    except NOT_JSON:
        return Problem(body[:500].decode(errors="replace") or "the provider gave no reason")
    return problem_of(data)


def problem_of(data: Any) -> Problem:
    if isinstance(data, list) and data:  # Gemini's streams that are none
        data = data[0]
    if isinstance(data, dict) and isinstance(data.get("errors"), list) and data["errors"] and "error" not in data:
        data = data["errors"][0]  # Cloudflare's
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return Problem(str(error or "the provider gave no reason")[:500])
    message = error.get("message") or error.get("detail") or "the provider gave no reason"
    kind, code = str(error.get("type") or error.get("status") or ""), error.get("code")
    numeric = code if isinstance(code, int) and 400 <= code < 600 else 0
    text = code if isinstance(code, str) else ""
    return Problem(str(message), kind, text, numeric or _STATUS_OF_TYPE.get(kind) or _STATUS_OF_TYPE.get(text, 0))


def raised(data: Any) -> UpstreamFailed:
    """An error event in the middle of a stream."""
    problem = problem_of(data)
    return TranslatedError.of(problem, problem.status or 502)


def translate_error(body: bytes, status: int, target: Spoken) -> bytes:
    """A provider's error as the client's dialect says it."""
    error: EmberlineError = TranslatedError.of(read_error(body), status)
    return msgspec.json.encode(error_body(error, target))
