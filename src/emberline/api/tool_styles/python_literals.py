"""Reads Python literals that models write as arguments. Nothing is evaluated: other expressions are rejected."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

_JSON_WORDS = {"true": True, "false": False, "null": None}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_STRING_OR_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\b(?:True|False|None)\b', re.DOTALL)


class PythonLiteralScanner:
    """Finds where an expression ends, by brackets and quotes."""

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""  # one or three quotation marks inside a string, otherwise empty
        self._text = ""  # the last characters of the string
        self._in_escape = False
        self._empty_quote = ""  # after an empty string: a third quotation mark would make it a long string

    @property
    def is_at_top(self) -> bool:
        """Whether the next character is outside of strings and brackets."""
        return not self._quote and self.depth == 0

    def consume_char(self, char: str) -> None:
        if self._quote:
            self._consume_string_char(char)
            return
        if char == self._empty_quote:
            self._quote, self._text = char * 3, ""
        elif char in "\"'":
            self._quote, self._text = char, ""
        elif char in "([{":
            self.depth += 1
        elif char in ")]}":
            self.depth -= 1
        self._empty_quote = ""

    def _consume_string_char(self, char: str) -> None:
        if self._in_escape:
            self._in_escape, self._text = False, "x"
            return
        if char == "\\":
            self._in_escape = True
            return
        self._text = (self._text + char)[-3:]
        if self._text.endswith(self._quote):
            self._empty_quote = char if self._text == char and len(self._quote) == 1 else ""
            self._quote = ""


def literal_to_json(text: str) -> str | None:
    """Return the JSON of a literal in JSON or in Python; None if the text is any other expression."""
    for candidate in (text, _STRING_OR_WORD.sub(_replace_word, text)):
        if _is_json(candidate):
            # JSON allows some values that cannot be converted, such as 1e999: they stay as they are.
            return _convert(partial(json.loads, candidate)) or candidate.strip()
    return _convert(lambda: _convert_node(ast.parse(text.strip(), mode="eval").body))


def _convert(read: Callable[[], Any]) -> str | None:
    try:
        encoded = json.dumps(read(), ensure_ascii=False, allow_nan=False)
        encoded.encode()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return encoded


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_reject_constant, parse_int=str, parse_float=str)
        text.encode()
    except (ValueError, RecursionError):
        return False
    return True


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def _replace_word(found: re.Match[str]) -> str:
    return _PYTHON_WORDS.get(found[0], found[0])


def _convert_node(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_convert_node(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_convert_key(key): _convert_node(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
    raise ValueError("not a literal")


def _convert_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is not a string")
