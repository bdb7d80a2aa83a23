"""UserQuestion: the last user turn of a call, separate from everything else in it.

Two calls can only be similar if everything else is equal: tenant, model, system prompt, earlier turns, tools and
parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.gateway.body import canonical
from emberline.gateway.cache.key import cache_key
from emberline.gateway.call import Call

TURNS = {"openai-chat": "messages", "anthropic": "messages", "openai-responses": "input", "gemini": "contents"}
TEXTS = ("text", "input_text")  # of parts that contain only text
LONGEST = 2000  # about what an embedder reads; longer texts are hardly ever repeated
NOT = re.compile(r"\b(?:not|no|never|none|without|except|un\w{3,}|dis\w{3,})\b|n['\u2019]t\b", re.IGNORECASE)
NUMBER = re.compile(r"\w*\d[\w.,:%-]*")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    partition: str  # equal for calls that differ only in their question

    @staticmethod
    def of(call: Call) -> Question | None:
        """Return the question of a call, or None if its last turn is not a user's or not only text."""
        field = TURNS.get(call.dialect)
        if field is None or call.options.cache_key is not None or not canonical(call.body).startswith(b"json:"):
            return None
        body = msgspec.json.decode(call.body)
        turns = body.get(field) if isinstance(body, dict) else None
        text, earlier = (turns, []) if isinstance(turns, str) else _last(turns)
        if not text or len(text) > LONGEST:
            return None
        body[field] = earlier
        return Question(text, "rest:" + cache_key(call.moved(body=msgspec.json.encode(body))))

    @property
    def exact(self) -> tuple[list[str], int]:
        """The numbers and the count of negations, in which similar questions must agree exactly."""
        return sorted(NUMBER.findall(self.text)), len(NOT.findall(self.text))


def _last(said: object) -> tuple[str, list[Any]]:
    """Return the text of the last user turn ("" if there is none) and the turns before it."""
    if not isinstance(said, list) or not said or not isinstance(said[-1], Mapping):
        return "", []
    turn = said[-1]
    content: Any = turn.get("content", turn.get("parts"))
    if turn.get("role", "user") != "user":
        return "", []
    if isinstance(content, list) and all(map(_only_text, content)):
        content = "\n".join(part["text"] for part in content)
    return (content if isinstance(content, str) else ""), said[:-1]


def _only_text(part: object) -> bool:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    return part.get("type", "text") in TEXTS and set(part) <= {"type", "text"}
