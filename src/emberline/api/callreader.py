"""Reads one tool call, `{"name": ..., "arguments": {...}}`, a character at a time; the arguments pass through."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum

WHITESPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEAD = 4096  # characters before the arguments; what is longer is no call


class Status(Enum):
    READING = "reading"
    DONE = "done"
    BROKEN = "broken"


class Value:
    """Where a JSON value ends. Brackets are counted, not matched: what stands in them is for the client to judge."""

    def __init__(self) -> None:
        self.depth = 0
        self.quoted = False
        self.escaped = False

    def ends_with(self, char: str) -> bool:
        """Takes the next character of a string, object or array; true if it is the last."""
        if self.quoted:
            if self.escaped:
                self.escaped = False
            elif char == "\\":
                self.escaped = True
            elif char == '"':
                self.quoted = False
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        return self.depth == 0 and not self.quoted


class CallReader:
    """`begun` turns true when the call is certain: its name is complete and its arguments are an object.
    A call that breaks before is none; one that breaks later stands, with the arguments it had.
    Other keys are read over. Without arguments it is a call only where `marked` says that a marker stood before it."""

    def __init__(self, marked: bool) -> None:
        self.marked = marked
        self.status = Status.READING
        self.name: str | None = None
        self.begun = False
        self._read = 0
        self._key = ""
        self._raw = ""  # of the string or value being read
        self._early = ""  # arguments that came before the name
        self._value = Value()
        self._take: Callable[[str], str] = self._open

    @property
    def is_likely_call(self) -> bool:
        """Whether it begins as a call does: its name comes first, and then its arguments."""
        if self._take == self._in_key:
            return self.name is not None and any(f'"{key}"'.startswith(self._raw) for key in ARGUMENT_KEYS)
        return self._key == "name" or (self.name is not None and self._key in ARGUMENT_KEYS)

    def feed(self, char: str) -> str:
        """What this character adds to the arguments."""
        assert self.status is Status.READING
        self._read += 1
        if self._read > MAX_HEAD and not self.begun:
            return self._break()
        return self._take(char)

    def _break(self) -> str:
        self.status = Status.BROKEN
        return ""

    def _open(self, char: str) -> str:
        self._take = self._before_key
        return "" if char == "{" else self._break()

    def _before_key(self, char: str) -> str:
        if char == '"':
            self._start_value(self._in_key)
            return self._take(char)
        return "" if char in WHITESPACE else self._break()

    def _in_key(self, char: str) -> str:
        self._raw += char
        if self._value.ends_with(char):
            key = _string(self._raw)
            if key is None:
                return self._break()
            self._key, self._take = key, self._before_colon
        return ""

    def _before_colon(self, char: str) -> str:
        if char == ":":
            self._take = self._before_value
            return ""
        return "" if char in WHITESPACE else self._break()

    def _before_value(self, char: str) -> str:
        if char in WHITESPACE:
            return ""
        if self._key in ARGUMENT_KEYS:
            if char != "{" or self.begun or self._early:
                return self._break()
            self._start_value(self._in_arguments)
        elif self._key == "name":
            if char != '"' or self.name is not None:
                return self._break()
            self._start_value(self._in_name)
        else:
            self._start_value(self._in_other if char in '"{[' else self._in_scalar)
        return self._take(char)

    def _start_value(self, take: Callable[[str], str]) -> None:
        self._raw, self._value, self._take = "", Value(), take

    def _in_name(self, char: str) -> str:
        self._raw += char
        if not self._value.ends_with(char):
            return ""
        self.name, self._take = _string(self._raw), self._after_value
        if not self.name:
            return self._break()
        if self._early:
            self.begun = True
        return self._early

    def _in_arguments(self, char: str) -> str:
        if self._value.ends_with(char):
            self._take = self._after_value
        if self.name is None:
            self._early += char
            return ""
        self.begun = True
        return char

    def _in_other(self, char: str) -> str:
        if self._value.ends_with(char):
            self._take = self._after_value
        return ""

    def _in_scalar(self, char: str) -> str:
        if char in WHITESPACE or char in ",}":
            return self._after_value(char)
        return "" if char.isalnum() or char in "+-." else self._break()

    def _after_value(self, char: str) -> str:
        self._take = self._after_value
        if char == ",":
            self._take = self._before_key
        elif char == "}":
            return self._close()
        elif char not in WHITESPACE:
            return self._break()
        return ""

    def _close(self) -> str:
        if self.begun:
            self.status = Status.DONE
            return ""
        if self.name is None or not self.marked:
            return self._break()
        self.begun, self.status = True, Status.DONE
        return "{}"


def _string(raw: str) -> str | None:
    """What the string says; None for one that is no JSON, or no Unicode."""
    try:
        value: str = json.loads(raw)
        value.encode()
    except ValueError:
        return None
    return value
