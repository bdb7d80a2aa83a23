"""Fields: a JSON object from outside, being read. What is taken was understood; what is `left` was not."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.inner import Json

T = TypeVar("T")
_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


class Fields:
    def __init__(self, raw: object, path: str) -> None:
        self.left: Json = dict(expect(raw, dict, path or "the body"))
        self.path = path

    @overload
    def take(self, name: str, kind: type[T]) -> T | None: ...
    @overload
    def take(self, name: str, kind: type[T], default: T) -> T: ...
    def take(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """None and nothing are alike, but null stays in `left`: it was said, and means nothing."""
        value = self.left.get(name)
        if value is None:
            return default
        checked = expect(value, kind, self.at(name))
        del self.left[name]
        return checked

    def need(self, name: str, kind: type[T]) -> T:
        value = self.take(name, kind)
        if value is None:
            raise InvalidRequest(f"{self.at(name)} is required", param=self.at(name))
        return value

    def texts(self, name: str) -> list[str] | None:
        rows = self.take(name, list)
        return None if rows is None else [expect(row, str, self.at(name)) for row in rows]

    def raw(self, name: str) -> Any:
        """Whatever it is; null and nothing stay."""
        value = self.left.get(name)
        if value is not None:
            del self.left[name]
        return value

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def expect(value: object, kind: type[T], path: str) -> T:
    if kind is float and type(value) is int:
        return value  # type: ignore[return-value]  # a number is a number
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidRequest(f"{path} must be {_WORDS[kind]}", param=path)
    return value


def unknown(what: object, path: str, known: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is not known: {str(what)[:100]!r}", param=path, hint=f"known are {known}")
