"""AdminRequest: one request to the management API, and the decoding of its values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.identity import Identity
from emberline.net.json_errors import JSON_DECODE_ERRORS

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MESSAGE_AND_PATH = re.compile(r"(.*?)(?: - at `\$?\.?(.*)`)?", re.S)
_FIELD = re.compile(r"field `(.*)`")


@dataclass(frozen=True, slots=True)
class AdminRequest:
    identity: Identity
    path_parameters: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    origin: str = ""  # scheme and host by which the caller reached the gateway

    @property
    def account(self) -> str:
        return self.path_parameters["account"]

    def decode_body(self, kind: type[T]) -> T:
        return decode_json(self.body, kind)

    def int_parameter(self, name: str, default: int, minimum: int, maximum: int) -> int:
        """Return a query parameter. Raise InvalidRequest if it is not an integer in the range."""
        text = self.query.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
            raise InvalidRequest(
                f"query parameter {name} is {text[:40]!r}; it must be an integer from {minimum} to {maximum}",
                param=name,
            )
        return int(text)

    def bool_parameter(self, name: str) -> bool | None:
        """Return a query parameter, or None if it is not given. Raise InvalidRequest unless true or false."""
        text = self.query.get(name)
        if text is None:
            return None
        if text not in ("true", "false"):
            raise InvalidRequest(f"query parameter {name} is {text[:40]!r}; it must be true or false", param=name)
        return text == "true"


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode JSON as this type; an empty body is {}. Raise InvalidRequest if it does not fit."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as e:
        raise to_invalid_request(e) from e
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(f"the body is not JSON: {e}") from e


def convert_value(value: Any, kind: type[T]) -> T:
    """Convert decoded JSON to this type. Raise InvalidRequest if it does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise to_invalid_request(e) from e


def to_invalid_request(e: msgspec.ValidationError) -> InvalidRequest:
    """Return the error with msgspec's message; its `param` is the path at the end of that message."""
    if isinstance(e.__cause__, InvalidRequest):
        return e.__cause__
    parts = _MESSAGE_AND_PATH.fullmatch(str(e))
    assert parts is not None
    message, path = parts[1], parts[2] or ""
    if field := _FIELD.search(message):  # a missing or unknown field is only in the message
        path = f"{path}.{field[1]}" if path else field[1]
    return InvalidRequest(message, param=path or None)


def check_name(name: str, param: str) -> str:
    """Return the name if it can be part of a URL path, else raise InvalidRequest."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        hint = "use 1 to 64 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(f"{param} {name[:80]!r} is not a valid name", param=param, hint=hint)
    return name
