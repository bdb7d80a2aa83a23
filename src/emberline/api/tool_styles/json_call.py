"""JsonCallParser: reads one tool call, `{"name": ..., "arguments": {...}}`, one character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable

from emberline.api.tool_styles.call_reader import WHITESPACE, ParseStatus

ARGUMENT_KEYS = ("arguments", "parameters")


class JsonValueScanner:
    """Finds the end of a JSON value by counting brackets.

    The value itself is not validated; that is left to the client.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.in_escape = False

    def consume_char(self, char: str) -> bool:
        """Consume the next character of a string, object or array, and return whether the value ends with it."""
        if self.in_string:
            if self.in_escape:
                self.in_escape = False
            elif char == "\\":
                self.in_escape = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        return self.depth == 0 and not self.in_string


class JsonCallParser:
    """Parses one tool call and passes its arguments on as they are written.

    `is_confirmed` becomes true once the name is complete and the arguments have begun as an object. Text that becomes
    invalid before that is not a call. A call that becomes invalid later keeps the arguments read until then. Keys other
    than name and arguments are skipped. A call without arguments is accepted only after an opening marker
    (`has_marker`).
    """

    def __init__(self, has_marker: bool, name_key: str = "name") -> None:
        self.has_marker = has_marker
        self._name_key = name_key
        self.status = ParseStatus.INCOMPLETE
        self.name: str | None = None
        self.is_confirmed = False
        self._key = ""
        self._raw = ""  # text of the string or value being read
        self._early = ""  # arguments read before the name
        self._value = JsonValueScanner()
        self._state: Callable[[str], str] = self._parse_opening_brace

    @property
    def is_likely_call(self) -> bool:
        """Whether the text begins like a call: first the name, then the arguments."""
        if self._state == self._parse_key:
            return self.name is not None and any(f'"{key}"'.startswith(self._raw) for key in ARGUMENT_KEYS)
        return self._key == self._name_key or (self.name is not None and self._key in ARGUMENT_KEYS)

    def feed(self, char: str) -> str:
        """Consume one character and return the text it adds to the arguments."""
        assert self.status is ParseStatus.INCOMPLETE
        return self._state(char)

    def _reject_call(self) -> str:
        self.status = ParseStatus.INVALID
        return ""

    def _parse_opening_brace(self, char: str) -> str:
        self._state = self._parse_before_key
        return "" if char == "{" else self._reject_call()

    def _parse_before_key(self, char: str) -> str:
        if char == '"':
            self._start_value(self._parse_key)
            return self._state(char)
        return "" if char in WHITESPACE else self._reject_call()

    def _parse_key(self, char: str) -> str:
        self._raw += char
        if self._value.consume_char(char):
            key = _decode_string(self._raw)
            if key is None:
                return self._reject_call()
            self._key, self._state = key, self._parse_colon
        return ""

    def _parse_colon(self, char: str) -> str:
        if char == ":":
            self._state = self._parse_before_value
            return ""
        return "" if char in WHITESPACE else self._reject_call()

    def _parse_before_value(self, char: str) -> str:
        if char in WHITESPACE:
            return ""
        if self._key in ARGUMENT_KEYS:
            if char != "{" or self.is_confirmed or self._early:
                return self._reject_call()
            self._start_value(self._parse_arguments)
        elif self._key == self._name_key:
            if char != '"' or self.name is not None:
                return self._reject_call()
            self._start_value(self._parse_name)
        else:
            self._start_value(self._skip_other_value if char in '"{[' else self._skip_scalar)
        return self._state(char)

    def _start_value(self, state: Callable[[str], str]) -> None:
        self._raw, self._value, self._state = "", JsonValueScanner(), state

    def _parse_name(self, char: str) -> str:
        self._raw += char
        if not self._value.consume_char(char):
            return ""
        self.name, self._state = _decode_string(self._raw), self._parse_after_value
        if not self.name:
            return self._reject_call()
        if self._early:
            self.is_confirmed = True
        return self._early

    def _parse_arguments(self, char: str) -> str:
        if self._value.consume_char(char):
            self._state = self._parse_after_value
        if self.name is None:
            self._early += char
            return ""
        self.is_confirmed = True
        return char

    def _skip_other_value(self, char: str) -> str:
        if self._value.consume_char(char):
            self._state = self._parse_after_value
        return ""

    def _skip_scalar(self, char: str) -> str:
        if char in WHITESPACE or char in ",}":
            return self._parse_after_value(char)
        return "" if char.isalnum() or char in "+-." else self._reject_call()

    def _parse_after_value(self, char: str) -> str:
        self._state = self._parse_after_value
        if char == ",":
            self._state = self._parse_before_key
        elif char == "}":
            return self._finish_call()
        elif char not in WHITESPACE:
            return self._reject_call()
        return ""

    def _finish_call(self) -> str:
        if self.is_confirmed:
            self.status = ParseStatus.COMPLETE
            return ""
        if self.name is None or not self.has_marker:
            return self._reject_call()
        self.is_confirmed, self.status = True, ParseStatus.COMPLETE
        return "{}"


def _decode_string(raw: str) -> str | None:
    """Decode a JSON string; None if it is not valid JSON or not valid Unicode."""
    try:
        value: str = json.loads(raw)
        value.encode()
    except ValueError:
        return None
    return value
