"""Decodes request JSON into typed structs, with errors that name the field.

Every error is an InvalidRequest whose `param` is the JSON path of the field, such as `messages[0].content`. An endpoint
declares its body as a `WireStruct` and calls `decode_request(body, TheStruct)`. A known field that is not supported has
type `None`: null is accepted, and any other value is an error that names the field.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from emberline.api.fields import IgnoredFields, find_ignored_fields, remove_unknown_fields
from emberline.core.errors import InvalidRequest

MAX_JSON_DEPTH = 64  # levels of nesting: templates and schema compilers recurse, and real requests need far fewer

MAX_UNKNOWN_FIELDS = 1000  # of one request whose names are kept

_ERROR_LOCATION = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD_ERROR = re.compile(r"^Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class WireStruct(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object in a request. `decode_request` removes unknown fields; for `decode` they are an error."""


def decode(body: bytes, struct_type: type[T]) -> T:
    """Decode JSON. Raises InvalidRequest with the name of the invalid field."""
    return _decode_json(body, struct_type, "")


def decode_request(body: bytes, struct_type: type[S]) -> tuple[S, IgnoredFields]:
    """Decode a request body, and return it with the names of the fields that have no effect.

    Unknown fields are left out, as are nulls. Raises InvalidRequest with the name of a field that is invalid or not
    supported.
    """
    unknown: list[str] = []
    try:
        request = _decode_json(body, struct_type, "")
    except InvalidRequest as first_error:
        if not _is_within_max_depth(body):
            raise
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise first_error from None
        known, unknown = remove_unknown_fields(value, struct_type)
        if known == value:
            raise
        request = _decode_json(msgspec.json.encode(known), struct_type, "")
    return request, IgnoredFields(tuple(find_ignored_fields(request)), tuple(unknown[:MAX_UNKNOWN_FIELDS]))


def decode_json_object(text: str, param: str) -> dict[str, Any]:
    """Decode a JSON object that a field holds as text, such as a tool call's arguments."""
    return _decode_json(text.encode(), dict[str, Any], param)


def encode_json_text(value: Any) -> str:
    """Return the JSON text of a value."""
    return msgspec.json.encode(value).decode()


def _decode_json(data: bytes, struct_type: type[T], outer_path: str) -> T:
    try:
        value = msgspec.json.decode(data, type=struct_type)
    except msgspec.ValidationError as error:
        raise _to_invalid_request(str(error), outer_path) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{outer_path or 'request body'} is not valid UTF-8: {error.reason}", param=outer_path or None
        ) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"{outer_path or 'request body'} is not valid JSON: {error}", param=outer_path or None
        ) from None
    except RecursionError:
        raise _make_depth_error(outer_path) from None
    if not _is_within_max_depth(data):
        raise _make_depth_error(outer_path)
    return value


def _to_invalid_request(msgspec_message: str, outer_path: str) -> InvalidRequest:
    """Convert msgspec's error message, which contains the field's JSON path, to an InvalidRequest."""
    match = _ERROR_LOCATION.match(msgspec_message)
    assert match is not None, msgspec_message
    what, path = match["what"], _join_json_path(outer_path, match["path"] or "")
    if what.startswith("Expected `null`"):
        return InvalidRequest(f"{path} is not supported by this server", param=path, hint=f"remove {path}")
    if (field := _FIELD_ERROR.match(what)) is None:
        what = what[:1].lower() + what[1:300]
        return InvalidRequest(f"{path or 'request body'}: {what}", param=path or None)
    path = _join_json_path(path, field["name"][:100])
    if field["fault"] == "missing required":
        return InvalidRequest(f"{path} is required and missing", param=path)
    return InvalidRequest(f"{path} is an unknown field", param=path, hint="check its spelling, or remove it")


def _join_json_path(outer: str, inner: str) -> str:
    dot = "." if outer and inner and not inner.startswith("[") else ""
    return f"{outer}{dot}{inner}"


def _is_within_max_depth(data: bytes) -> bool:
    """Return whether valid JSON nests at most MAX_JSON_DEPTH levels deep.

    Each round removes the innermost pairs of brackets with one bytes.replace, which is fast for large bodies.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return True
    brackets = _STRING.sub(b"", data).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _make_depth_error(outer_path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{outer_path or 'request body'} is nested deeper than {MAX_JSON_DEPTH} levels",
        param=outer_path or None,
        hint="send JSON with fewer levels",
    )
