"""Question: the last thing a user said, and apart from it everything else that was asked. Two calls can only mean the
same if all else is equal: who asks, the model, the system prompt, the turns before, tools and parameters."""

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
TEXTS = ("text", "input_text")  # the types of a part that is only text
LONGEST = 2000  # characters: an embedder reads about so many, and a long text is hardly ever asked twice
NOT = re.compile(r"\b(?:not|no|never|none|without|except|un\w{3,}|dis\w{3,})\b|n['\u2019]t\b", re.IGNORECASE)
NUMBER = re.compile(r"\w*\d[\w.,:%-]*")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    partition: str  # the same for calls that differ in nothing else

    @staticmethod
    def of(call: Call) -> Question | None:
        """None: its last turn is not a user's, or not only text."""
        turns = TURNS.get(call.dialect)
        if turns is None or call.options.cache_key is not None or not canonical(call.body).startswith(b"json:"):
            return None
        body = msgspec.json.decode(call.body)
        said = body.get(turns) if isinstance(body, dict) else None
        text, before = (said, []) if isinstance(said, str) else _last(said)
        if not text or len(text) > LONGEST:
            return None
        body[turns] = before
        return Question(text, "rest:" + cache_key(call.moved(body=msgspec.json.encode(body))))

    @property
    def exact(self) -> tuple[list[str], int]:
        """What a small difference of changes the whole: numbers, and whether something is denied."""
        return sorted(NUMBER.findall(self.text)), len(NOT.findall(self.text))


def _last(said: object) -> tuple[str, list[Any]]:
    """The text of the last turn, and the turns before it."""
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
