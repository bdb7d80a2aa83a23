"""Converts arguments that a model wrote in another syntax to parts of a JSON object, as they are read."""

from __future__ import annotations

import json


class ArgumentWriter:
    """Writes the JSON around argument values: the braces, the keys and the commas.

    The text written so far, joined with the values, is always the beginning of a JSON object.
    """

    def __init__(self) -> None:
        self._num_arguments = 0

    def write_key(self, name: str) -> str:
        """Return the text before the value of an argument."""
        lead = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def write_end(self) -> str:
        return "}" if self._num_arguments else "{}"


class TextValueReader:
    """Reads plain text up to an end marker, and returns the characters that cannot be part of the marker.

    One line break after the start and one before the marker are dropped if `trims_lines` is set.
    """

    def __init__(self, *ends: str, trims_lines: bool) -> None:
        self.is_complete = False
        self._is_first = trims_lines
        self._ends = (*ends, *("\n" + end for end in ends)) if trims_lines else ends
        self._first_chars = frozenset(end[:1] for end in self._ends)
        self._held = ""

    @property
    def num_held(self) -> int:
        """The number of characters that may still become the marker."""
        return len(self._held)

    @property
    def end_marker(self) -> str:
        """The marker that ended the text."""
        return self._held

    def feed(self, char: str) -> str:
        """Consume one character and return the text that it adds to the value."""
        if self._is_first and char == "\n":
            self._is_first = False
            return ""
        self._is_first = False
        if not self._held and char not in self._first_chars:
            return char
        self._held += char
        at = 0
        while not any(end.startswith(self._held[at:]) for end in self._ends):
            at += 1
        certain, self._held = self._held[:at], self._held[at:]
        self.is_complete = self._held in self._ends
        return certain


def escape_json(text: str) -> str:
    """Return the text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
