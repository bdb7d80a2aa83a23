"""Reads a JSON object field by field. Fields that were not read stay in `unread`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, overload

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.canonical import Json, Part, TextContent

T = TypeVar("T")
ValueParser: TypeAlias = Callable[[object, str], T]  # takes a value and its path
_TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


class FieldReader:
    """Reads the fields of one JSON object. `path` is the object's path, for error messages."""

    def __init__(self, raw: object, path: str) -> None:
        self.whole: Json = check_type(raw, dict, path or "the body")
        self.unread = dict(self.whole)
        self.path = path

    @overload
    def read(self, name: str, expected_type: type[T]) -> T | None: ...
    @overload
    def read(self, name: str, expected_type: type[T], default: T) -> T: ...
    def read(self, name: str, expected_type: type[T], default: T | None = None) -> T | None:
        """Remove a field from `unread` and return it, or `default` if it is absent or null.

        A null stays in `unread`, so that rendering into the same wire format writes it again. Raises InvalidRequest
        for a wrong type.
        """
        value = self.unread.get(name)
        if value is None:
            return default
        checked = check_type(value, expected_type, self.path_of(name))
        del self.unread[name]
        return checked

    def require(self, name: str, expected_type: type[T]) -> T:
        value = self.read(name, expected_type)
        if value is None:
            raise InvalidRequest(f"{self.path_of(name)} is required", param=self.path_of(name))
        return value

    def read_list(self, name: str, parse: ValueParser[T]) -> list[T]:
        """Remove a list from `unread` and return its parsed entries. An empty list or null stays in `unread`."""
        if self.unread.get(name) == []:
            return []
        return parse_rows(self.read(name, list, []), self.path_of(name), parse)

    def read_strings(self, name: str) -> list[str] | None:
        rows = self.read(name, list)
        return None if rows is None else [check_type(row, str, self.path_of(name)) for row in rows]

    def read_any(self, name: str) -> Any:
        """Remove a field of any type from `unread` and return it. A null stays in `unread`."""
        value = self.unread.get(name)
        if value is not None:
            del self.unread[name]
        return value

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def parse_rows(rows: list[Any], path: str, parse: ValueParser[T]) -> list[T]:
    return [parse(row, f"{path}[{index}]") for index, row in enumerate(rows)]


def parse_content(content: object, path: str, parse_part: ValueParser[Part]) -> tuple[list[Part], str]:
    """Return the parts of a message's content, and its form: "text" (a bare string), "list" or "absent"."""
    if content is None:
        return [], "absent"
    if isinstance(content, str):
        return [TextContent(content)], "text"
    return parse_rows(check_type(content, list, path), path, parse_part), "list"


def check_type(value: object, expected_type: type[T], path: str) -> T:
    if expected_type is float and type(value) is int:
        return value  # type: ignore[return-value]  # JSON does not distinguish 1 from 1.0
    if not isinstance(value, expected_type) or (expected_type is int and isinstance(value, bool)):
        raise InvalidRequest(f"{path} must be {_TYPE_NAMES[expected_type]}", param=path)
    return value


def make_unknown_value_error(value: object, path: str, known_values: str) -> InvalidRequest:
    return InvalidRequest(f"{path} has an unknown value: {str(value)[:100]!r}", param=path, hint=f"use {known_values}")
