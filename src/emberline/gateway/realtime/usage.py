"""Reads the usage from the messages of a realtime session; each message covers one response."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from emberline.gateway.costs.usage import Usage
from emberline.net.notjson import NOT_JSON

_SIGN = re.compile("response.done|usageMetadata")  # OpenAI and compatible providers; Gemini
_BINARY_SIGN = re.compile(_SIGN.pattern.encode())


def realtime_usage(message: str | bytes) -> Usage | None:
    """Return the usage that a message reports, None if it reports none."""
    if not (
        _SIGN.search(message) if isinstance(message, str) else _BINARY_SIGN.search(message)
    ):  # fast path: nearly all messages
        return None
    try:
        data = msgspec.json.decode(message)
    except NOT_JSON:
        return None
    match data:
        case {"type": "response.done", "response": {"usage": dict(usage)}}:
            details = {"input_tokens_details": usage.get("input_token_details")}  # Responses' name for it
            return Usage.read("openai-responses", {**usage, **details})
        case {"usageMetadata": dict(usage)}:
            return Usage.read("gemini", _as_whole(usage))
    return None


def _as_whole(usage: dict[str, Any]) -> dict[str, Any]:
    """Return Gemini's realtime usage with the field names of an ordinary reply."""
    return {**usage, "candidatesTokenCount": usage.get("responseTokenCount", usage.get("candidatesTokenCount"))}
