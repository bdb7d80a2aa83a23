"""Reads providers' error responses, and writes error replies in the client's dialect (wire format)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from emberline.core.error_texts import printable_error
from emberline.core.errors import EmberlineError, MethodNotAllowed
from emberline.gateway.core.errors import BlockedByGuardrail, ProviderErrorReply, RefusalReason
from emberline.gateway.core.request import Dialect, GatewayReply
from emberline.gateway.dialects.errors import parse_error, render_error
from emberline.wire import sse
from emberline.wire.errors import render_anthropic_error, render_openai_error

BUSY_STATUSES = (408, 409, 425, 429)
_CONTEXT = ("context_length", "context length", "context window", "maximum context", "prompt is too long",
            "too many tokens", "exceeds the maximum number of tokens", "input is too long", "maximum prompt length",
            "too large for model", "request too large", "max_new_tokens` must be")  # fmt: skip
_FILTERED = ("content_filter", "content_policy", "content management policy", "responsibleaipolicy", "flagged_input",
             "violates usage guidelines")  # fmt: skip
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d+(?:\.\d+)?)s"')  # Google sends it in the body
_FORWARDED = ("content-type", "retry-after", "retry-after-ms", "x-request-id", "request-id", "x-should-retry")


def read_provider_error(
    provider: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    dialect: Dialect,
    secrets: Iterable[str] = (),
) -> ProviderErrorReply:
    """Return the error for a provider's error response. `headers` must be a case-insensitive mapping.

    `secrets` are removed from the message, as providers repeat the key that they reject.
    """
    message = printable_error(parse_error(body).message, secrets)
    error = ProviderErrorReply(
        f"provider {provider} answered with status {status}: {message}",
        reason=_classify_refusal(status, body),
        status=status,
        headers=headers,
        body=body,
        dialect=dialect,
    )
    error.retry_after = read_retry_after(headers)
    if error.retry_after is None and (delay := _RETRY_DELAY.search(body)):
        error.retry_after = float(delay[1])
    return error


def _classify_refusal(status: int, body: bytes) -> RefusalReason:
    if status in BUSY_STATUSES:
        return "busy"
    if status >= 500:
        return "server"
    if status == 424:  # Bedrock's status for a failure of the model
        return "server"
    if status in (400, 403, 413, 422):
        text = body[:4096].decode("utf-8", "replace").lower()
        if any(sign in text for sign in _FILTERED):
            return "filtered"
        if any(sign in text for sign in _CONTEXT):
            return "context"
        return "access" if status == 403 else "request"
    return "access" if status in (401, 402, 404) else "request"


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before a retry, or None if the headers contain no valid time."""
    milliseconds = headers.get("retry-after-ms", "")
    if milliseconds.replace(".", "", 1).isdecimal():
        return float(milliseconds) / 1e3
    value = headers.get("retry-after", "")
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()) if value else None
    except (ValueError, TypeError):
        return None


def error_reply(dialect: Dialect, error: Exception) -> GatewayReply:
    """Return the error as a reply in the client's dialect (wire format).

    A provider's error is passed on unchanged if the client uses the provider's dialect.
    """
    if isinstance(error, ProviderErrorReply) and error.dialect == dialect:
        forwarded = {name.lower(): value for name, value in error.headers.items() if name.lower() in _FORWARDED}
        return GatewayReply(
            error.status,
            forwarded,
            error.body,
            ended="error",
            error=error.code,
            error_message=printable_error(str(error)),
        )
    shaped = (render_anthropic_error if dialect == "anthropic" else render_openai_error)(error)
    body = render_error(error, dialect)
    headers = {"content-type": "application/json", **shaped.headers}
    if isinstance(error, ProviderErrorReply) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    if isinstance(error, BlockedByGuardrail):  # Cloudflare's fields beside those of the dialect
        body.update(success=False, errors=[{"code": error.cloudflare_code, "message": error.message}])
    code, message = "internal_error", ""
    if isinstance(error, EmberlineError):
        code, message = error.code, printable_error(str(error))
    return GatewayReply(shaped.status, headers, sse.dumps(body), ended="error", error=code, error_message=message)


def error_event(dialect: Dialect, error: EmberlineError, sequence_number: int = 0) -> bytes | None:
    """Return the error as the last event of a stream.

    Return None if the dialect (wire format) has no error event. Only a broken connection then shows the failure.
    `sequence_number` appears only in events of OpenAI's Responses API.
    """
    match dialect:
        case "openai-chat":
            return sse.encode_data_event(render_openai_error(error).body)
        case "anthropic":
            return sse.encode_named_event("error", render_anthropic_error(error).body)
        case "openai-responses":
            event = {
                "type": "error",
                "code": error.code,
                "message": str(error),
                "param": None,
                "sequence_number": sequence_number,
            }
            return sse.encode_named_event("error", event)
    return None
