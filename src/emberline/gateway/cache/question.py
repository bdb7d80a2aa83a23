"""UserQuestion: the last user message of a request, separated from the other parts of the request.

Two requests can only be similar if all other parts are equal: tenant, model, system prompt, earlier messages, tools and
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.gateway.cache.key import cache_key
from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.core.request_body import canonicalize_body

TURN_FIELDS = {"openai-chat": "messages", "anthropic": "messages", "openai-responses": "input", "gemini": "contents"}
EXACT_ACTIONS = (":countTokens", ":embedContent", ":batchEmbedContents")  # whose replies depend on every word
TEXT_PART_TYPES = ("text", "input_text")  # of parts that contain only text
MAX_QUESTION_CHARS = 2000  # about what an embedder reads; longer texts are hardly ever repeated
NEGATION = re.compile(r"\b(?:not|no|never|none|without|except|un\w{3,}|dis\w{3,})\b|n['\u2019]t\b", re.IGNORECASE)
NUMBER = re.compile(r"\w*\d[\w.,:%-]*")


@dataclass(frozen=True, slots=True)
class UserQuestion:
    text: str
    partition: str  # equal for calls that differ only in their question

    @staticmethod
    def from_call(call: GatewayRequest) -> UserQuestion | None:
        """Return the request's question, or None if the last message is not a user message with only text."""
        field = TURN_FIELDS.get(call.dialect)
        if (
            call.endpoint.endswith(EXACT_ACTIONS)
            or field is None
            or call.options.cache_key is not None
            or not canonicalize_body(call.body).startswith(b"json:")
        ):
            return None
        body = msgspec.json.decode(call.body)
        turns = body.get(field) if isinstance(body, dict) else None
        text, earlier = (turns, []) if isinstance(turns, str) else _split_last_user_text(turns)
        if not text or len(text) > MAX_QUESTION_CHARS:
            return None
        body[field] = earlier
        return UserQuestion(text, "rest:" + cache_key(call.with_changes(body=msgspec.json.encode(body))))

    @property
    def numbers_and_negations(self) -> tuple[list[str], int]:
        """The numbers in the text and the count of its negations. Questions that differ in either are not similar."""
        return sorted(NUMBER.findall(self.text)), len(NEGATION.findall(self.text))


def _split_last_user_text(messages: object) -> tuple[str, list[Any]]:
    """Return the text of the last message ("" if it is not a user's text) and the messages before it."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
        return "", []
    turn = messages[-1]
    content: Any = turn.get("content", turn.get("parts"))
    if turn.get("role", "user") != "user":
        return "", []
    if isinstance(content, list) and all(map(_is_text_only, content)):
        content = "\n".join(part["text"] for part in content)
    return (content if isinstance(content, str) else ""), messages[:-1]


def _is_text_only(part: object) -> bool:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    return part.get("type", "text") in TEXT_PART_TYPES and set(part) <= {"type", "text"}
