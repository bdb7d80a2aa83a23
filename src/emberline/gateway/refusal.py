"""Refusals: what a provider's error means, and an error as a reply in the client's dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from emberline.api import sse
from emberline.api.errors import anthropic_error, openai_error
from emberline.core.errors import EmberlineError, MethodNotAllowed
from emberline.gateway.call import Dialect, Reply
from emberline.gateway.dialects.problems import error_body, read_error
from emberline.gateway.errors import Blocked, Refused, Why

BUSY = (408, 409, 425, 429)
_CONTEXT = ("context_length", "context length", "context window", "maximum context", "prompt is too long",
            "too many tokens", "exceeds the maximum number of tokens", "input is too long", "maximum prompt length",
            "too large for model", "request too large", "max_new_tokens` must be")  # fmt: skip
_FILTERED = ("content_filter", "content_policy", "content management policy", "responsibleaipolicy", "flagged_input",
             "violates usage guidelines")  # fmt: skip
_WAIT = re.compile(rb'"retryDelay"\s*:\s*"(\d+(?:\.\d+)?)s"')  # Google says it in the body
_TOLD = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "request-id", "x-should-retry")


def refused(provider: str, status: int, headers: Mapping[str, str], body: bytes, dialect: Dialect) -> Refused:
    """`headers` find their names whatever the case."""
    said = read_error(body).message
    error = Refused(
        f"{provider} answered {status}: {said}",
        kind=_kind(status, body),
        status=status,
        headers=headers,
        body=body,
        dialect=dialect,
    )
    error.retry_after = retry_after(headers)
    if error.retry_after is None and (wait := _WAIT.search(body)):
        error.retry_after = float(wait[1])
    return error


def _kind(status: int, body: bytes) -> Why:
    if status in BUSY:
        return "busy"
    if status >= 500:
        return "server"
    if status == 424:  # of Bedrock: the model behind it failed
        return "server"
    if status in (400, 403, 413, 422):
        text = body[:4096].decode("utf-8", "replace").lower()
        if any(sign in text for sign in _FILTERED):
            return "filtered"
        if any(sign in text for sign in _CONTEXT):
            return "context"
        return "access" if status == 403 else "request"
    return "access" if status in (401, 402, 404) else "request"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; None: it does not say, or not in a way that can be understood."""
    milliseconds = headers.get("retry-after-ms", "")
    if milliseconds.replace(".", "", 1).isdecimal():
        return float(milliseconds) / 1e3
    said = headers.get("retry-after", "")
    if said.replace(".", "", 1).isdecimal():
        return float(said)
    try:
        return max(0.0, (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()) if said else None
    except (ValueError, TypeError):
        return None


def error_reply(dialect: Dialect, error: Exception) -> Reply:
    """A provider's own words where the client speaks its dialect; else an error of ours in the client's."""
    if isinstance(error, Refused) and error.dialect == dialect:
        kept = {name.lower(): value for name, value in error.headers.items() if name.lower() in _TOLD}
        return Reply(error.status, kept, error.body, ended="error", error=error.code)
    shaped = (anthropic_error if dialect == "anthropic" else openai_error)(error)
    body = error_body(error, dialect)
    headers = {"content-type": "application/json", **shaped.headers}
    if isinstance(error, Refused) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    if isinstance(error, Blocked):  # as Cloudflare tells it, beside what each dialect's clients look for
        body.update(success=False, errors=[{"code": error.number, "message": error.message}])
    return Reply(shaped.status, headers, sse.dumps(body), ended="error", error=getattr(error, "code", "internal_error"))


def last_words(dialect: Dialect, error: EmberlineError, number: int = 0) -> bytes | None:
    """The error as the last event of a stream; None: the dialect has none, and only a broken connection tells."""
    match dialect:
        case "openai-chat":
            return sse.data(openai_error(error).body)
        case "anthropic":
            return sse.event("error", anthropic_error(error).body)
        case "openai-responses":
            told = {
                "type": "error",
                "code": error.code,
                "message": str(error),
                "param": None,
                "sequence_number": number,
            }
            return sse.event("error", told)
    return None
