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
        found = msgspec.json.decode(message)
    except NOT_JSON:
        return None
    match found:
        case {"type": "response.done", "response": {"usage": dict(said)}}:
            parts = {"input_tokens_details": said.get("input_token_details")}  # which Responses spell so
            return Usage.read("openai-responses", {**said, **parts})
        case {"usageMetadata": dict(said)}:
            return Usage.read("gemini", _as_whole(said))
    return None


def _as_whole(said: dict[str, Any]) -> dict[str, Any]:
    """As a reply in one piece says it."""
    return {**said, "candidatesTokenCount": said.get("responseTokenCount", said.get("candidatesTokenCount"))}
