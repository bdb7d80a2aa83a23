"""Ask: one request to the management API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.keys.identity import Identity
from emberline.net.notjson import NOT_JSON

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_AT = re.compile(r"(.*?)(?: - at `\$?\.?(.*)`)?", re.S)
_FIELD = re.compile(r"field `(.*)`")


@dataclass(frozen=True, slots=True)
class Ask:
    identity: Identity
    parts: Mapping[str, str]  # of the path
    query: Mapping[str, str]
    body: bytes
    origin: str = ""  # scheme and host by which the caller reached the gateway

    @property
    def account(self) -> str:
        return self.parts["account"]

    def read(self, kind: type[T]) -> T:
        return decoded(self.body, kind)

    def number(self, name: str, default: int, least: int, most: int) -> int:
        text = self.query.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise InvalidRequest(f"{name} must be a whole number from {least} to {most}", param=name)
        return int(text)

    def flag(self, name: str) -> bool | None:
        text = self.query.get(name)
        if text is None:
            return None
        if text not in ("true", "false"):
            raise InvalidRequest(f"{name} must be true or false", param=name)
        return text == "true"


def decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as e:
        raise invalid(e) from e
    except NOT_JSON as e:
        raise InvalidRequest(f"the body is not JSON: {e}") from e


def converted(found: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as e:
        raise invalid(e) from e


def invalid(e: msgspec.ValidationError) -> InvalidRequest:
    """msgspec says what was wrong and, at the end, where."""
    if isinstance(e.__cause__, InvalidRequest):
        return e.__cause__
    found = _AT.fullmatch(str(e))
    assert found is not None
    what, where = found[1], found[2] or ""
    if field := _FIELD.search(what):  # that is missing, or not known
        where = f"{where}.{field[1]}" if where else field[1]
    return InvalidRequest(what, param=where or None)


def named(name: str, param: str) -> str:
    """A name that can stand in a path."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        hint = "1 to 64 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(f"{param} {name[:80]!r} is not a valid name", param=param, hint=hint)
    return name
