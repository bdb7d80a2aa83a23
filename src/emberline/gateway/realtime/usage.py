"""What a message of a realtime session says it used. Each says it of one answer, so a session's are added up."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from emberline.gateway.costs.usage import Usage
from emberline.net.notjson import NOT_JSON

_SIGN = re.compile("response.done|usageMetadata")  # OpenAI's and those alike; Gemini's
_BINARY_SIGN = re.compile(_SIGN.pattern.encode())


def realtime_usage(message: str | bytes) -> Usage | None:
    """None: nothing."""
    if not (_SIGN.search(message) if isinstance(message, str) else _BINARY_SIGN.search(message)):  # as of nearly all
        return None
    try:
        data = msgspec.json.decode(message)
    except NOT_JSON:
        return None
    match data:
        case {"type": "response.done", "response": {"usage": dict(usage)}}:
            details = {"input_tokens_details": usage.get("input_token_details")}  # which Responses spell so
            return Usage.read("openai-responses", {**usage, **details})
        case {"usageMetadata": dict(usage)}:
            return Usage.read("gemini", _as_whole(usage))
    return None


def _as_whole(usage: dict[str, Any]) -> dict[str, Any]:
    """As a reply in one piece says it."""
    return {**usage, "candidatesTokenCount": usage.get("responseTokenCount", usage.get("candidatesTokenCount"))}
