"""AdminRequest: one request to the management API.

Its methods decode the body and the query parameters.
"""

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

    def decode_body(self, target_type: type[T]) -> T:
        return decode_json(self.body, target_type)

    def int_parameter(self, name: str, default: int, minimum: int, maximum: int) -> int:
        """Return an integer query parameter. Raise InvalidRequest if the value is not an integer in the range."""
        text = self.query.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
            raise InvalidRequest(
                f"query parameter {name} must be an integer from {minimum} to {maximum}, not {text[:40]!r}",
                param=name,
            )
        return int(text)

    def bool_parameter(self, name: str) -> bool | None:
        """Return a boolean query parameter, or None if it is absent.

        Raise InvalidRequest if the value is neither true nor false.
        """
        text = self.query.get(name)
        if text is None:
            return None
        if text not in ("true", "false"):
            raise InvalidRequest(f"query parameter {name} must be true or false, not {text[:40]!r}", param=name)
        return text == "true"


def decode_json(body: bytes, target_type: type[T]) -> T:
    """Decode a JSON body to a value of type `target_type`; an empty body is read as {}.

    Raise InvalidRequest if the body does not match the type.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=target_type)
    except msgspec.ValidationError as e:
        raise to_invalid_request(e) from e
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}", hint="send a JSON object, or no body") from e


def convert_value(value: Any, target_type: type[T]) -> T:
    """Convert decoded JSON to a value of type `target_type`.

    Raise InvalidRequest if the JSON does not match the type.
    """
    try:
        return msgspec.convert(value, target_type)
    except msgspec.ValidationError as e:
        raise to_invalid_request(e) from e


def to_invalid_request(error: msgspec.ValidationError) -> InvalidRequest:
    """Convert msgspec's validation error to InvalidRequest.

    `param` is the path of the field, which msgspec names at the end of its message.
    """
    if isinstance(error.__cause__, InvalidRequest):
        return error.__cause__
    parts = _MESSAGE_AND_PATH.fullmatch(str(error))
    assert parts is not None
    message, path = parts[1], parts[2] or ""
    if field := _FIELD.search(message):  # a missing or unknown field is only in the message
        path = f"{path}.{field[1]}" if path else field[1]
    return InvalidRequest(message, param=path or None)


def check_name(name: str, param: str) -> str:
    """Return the name. Raise InvalidRequest if the name cannot be part of a URL path."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        hint = "use 1 to 64 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(f"{param} {name[:80]!r} is not a valid name", param=param, hint=hint)
    return name
