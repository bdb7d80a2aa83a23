"""Reads the values that Gemma 4 and FunctionGemma write: JSON with unquoted keys, and with strings between markers."""

from __future__ import annotations

import json
from typing import Any

from emberline.api.tool_styles.call_reader import WHITESPACE

MAX_NESTING = 64
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def literal_to_json(text: str, quote: str) -> str | None:
    """Return the JSON of a value, or None if the text is not a value. `quote` is the marker around strings."""
    try:
        parser = _LiteralParser(text, quote)
        value = parser.parse_value(0)
        parser.skip_space()
        if parser.at != len(text):
            return None
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
        encoded.encode()
    except ValueError:
        return None
    return encoded


def format_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{format_value(each, quote)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(format_value(each, quote) for each in value) + "]"
        case _:
            return json.dumps(value)


class _LiteralParser:
    """Parses one value. The methods raise ValueError if the text is not a value."""

    def __init__(self, text: str, quote: str) -> None:
        self.at = 0
        self._text, self._quote = text, quote

    def skip_space(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in WHITESPACE:
            self.at += 1

    def parse_value(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise ValueError("nested too deeply")
        self.skip_space()
        if self._text.startswith(self._quote, self.at):
            return self._parse_string()
        if self._skip("{"):
            pairs: dict[str, Any] = {}
            while not self._skip("}"):
                key = self._parse_key()
                pairs[key] = self.parse_value(depth + 1)
                self._skip_comma("}")
            return pairs
        if self._skip("["):
            items = []
            while not self._skip("]"):
                items.append(self.parse_value(depth + 1))
                self._skip_comma("]")
            return items
        return self._parse_scalar()

    def _parse_string(self) -> str:
        start = self.at + len(self._quote)
        end = self._text.index(self._quote, start)
        self.at = end + len(self._quote)
        return self._text[start:end]

    def _parse_key(self) -> str:
        self.skip_space()
        if self._text.startswith(self._quote, self.at):
            key = self._parse_string()
        else:
            end = self._text.index(":", self.at)
            key, self.at = self._text[self.at : end].strip(), end
        if not self._skip(":"):
            raise ValueError("no colon after a key")
        return key

    def _parse_scalar(self) -> Any:
        """Return a number, a boolean or None. Any other text counts as a string without markers."""
        start = self.at
        while self.at < len(self._text) and self._text[self.at] not in ",]}":
            self.at += 1
        text = self._text[start : self.at].strip()
        if not text:
            raise ValueError("no value")
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        try:
            number = json.loads(text)
        except ValueError:
            return text
        return number if isinstance(number, int | float) else text

    def _skip_comma(self, closing: str) -> None:
        self.skip_space()
        if not self._skip(",") and not self._text.startswith(closing, self.at):
            raise ValueError("no comma between values")

    def _skip(self, char: str) -> bool:
        self.skip_space()
        found = self._text.startswith(char, self.at)
        self.at += found
        return found
