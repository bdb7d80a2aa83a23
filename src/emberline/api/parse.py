"""Bytes from outside to typed structs: the one place where a request's JSON is decoded.

Every fault is an InvalidRequest whose `param` is the JSON path of the field, e.g. `messages[0].content`. An endpoint
declares its body as a `Wire` struct and calls `decode(body, TheStruct)`; a field that we know and do not serve is typed
`None`, so that null passes and anything else is refused by name.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from emberline.api.fields import without_nulls
from emberline.core.errors import InvalidRequest

MAX_DEPTH = 64  # templates and schema compilers recurse; no honest request comes near this

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

T = TypeVar("T")


class Wire(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object of a request. Unknown fields are refused."""


def decode(body: bytes, into: type[T]) -> T:
    """A null asks for nothing: it is accepted for any field that may be left out, known or not."""
    try:
        return _read(body, into, "")
    except InvalidRequest as refusal:
        if b"null" not in body or not _shallow(body):
            raise
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise refusal from None
        stripped = without_nulls(value, into)
        if stripped == value:
            raise
        return _read(msgspec.json.encode(stripped), into, "")


def decode_object(text: str, param: str) -> dict[str, Any]:
    """A JSON object that came as text inside a field, such as a tool call's arguments."""
    return _read(text.encode(), dict[str, Any], param)


def encode_text(value: Any) -> str:
    """JSON that came from a request, as text again."""
    return msgspec.json.encode(value).decode()


def _read(data: bytes, into: type[T], outer: str) -> T:
    try:
        value = msgspec.json.decode(data, type=into)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), outer) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{outer or 'the body'} is not valid UTF-8: {error.reason}", param=outer or None) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{outer or 'the body'} is not valid JSON: {error}", param=outer or None) from None
    except RecursionError:
        raise _too_deep(outer) from None
    if not _shallow(data):
        raise _too_deep(outer)
    return value


def _refusal(text: str, outer: str) -> InvalidRequest:
    """msgspec says what is wrong and where in one sentence; take it apart."""
    match = _AT.match(text)
    assert match is not None, text
    what, path = match["what"], _join(outer, match["path"] or "")
    if what.startswith("Expected `null`"):
        return InvalidRequest(f"{path} is not served", param=path, hint="leave it out")
    if (field := _FIELD.match(what)) is None:
        what = what[:1].lower() + what[1:300]
        return InvalidRequest(f"{path or 'the body'}: {what}", param=path or None)
    path = _join(path, field["name"][:100])
    if field["fault"] == "missing required":
        return InvalidRequest(f"{path} is required", param=path)
    return InvalidRequest(f"{path} is not a field we know", param=path, hint="leave it out, or check its spelling")


def _join(outer: str, inner: str) -> str:
    dot = "." if outer and inner and not inner.startswith("[") else ""
    return f"{outer}{dot}{inner}"


def _shallow(data: bytes) -> bool:
    """Whether valid JSON nests at most MAX_DEPTH deep: each round takes away the innermost pairs, at C speed."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return True
    brackets = _STRING.sub(b"", data).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _too_deep(outer: str) -> InvalidRequest:
    return InvalidRequest(f"{outer or 'the body'} nests more than {MAX_DEPTH} levels deep", param=outer or None)
