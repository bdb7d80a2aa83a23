"""Reads the usage from the messages of a realtime session. Each usage report covers one response."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire.usage import Usage

_USAGE_MARKER = re.compile("response.done|usageMetadata")  # OpenAI and compatible providers; Gemini
_BINARY_USAGE_MARKER = re.compile(_USAGE_MARKER.pattern.encode())


def parse_realtime_usage(message: str | bytes) -> Usage | None:
    """Return the usage that a message reports, or None."""
    marker = _USAGE_MARKER.search(message) if isinstance(message, str) else _BINARY_USAGE_MARKER.search(message)
    if not marker:  # fast path: nearly all messages
        return None
    try:
        data = msgspec.json.decode(message)
    except JSON_DECODE_ERRORS:
        return None
    match data:
        case {"type": "response.done", "response": {"usage": dict(usage)}}:
            details = {"input_tokens_details": usage.get("input_token_details")}  # Responses' name for it
            return Usage.parse("openai-responses", {**usage, **details})
        case {"usageMetadata": dict(usage)}:
            return Usage.parse("gemini", _to_reply_usage(usage))
    return None


def _to_reply_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return Gemini's realtime usage with the field names of an ordinary reply."""
    return {**usage, "candidatesTokenCount": usage.get("responseTokenCount", usage.get("candidatesTokenCount"))}
