"""Reads and replaces fields of a multipart/form-data body, in which clients upload audio, images and files.

Bodies that two parsers may read differently are rejected: the gateway would check one model and the provider run
another.
"""

from __future__ import annotations

import re

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request_body import BodyFields, check_model_name
from emberline.gateway.core.token_estimate import BYTES_PER_TOKEN, TOKENS_PER_ATTACHMENT

MAX_PARTS = 256
MAX_PART_HEADER_BYTES = 8192
_FORM_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"(?P<quoted>[^"\\]{1,70})"|(?P<plain>[^\s;"]{1,70}))\s*(?=;|$)', re.I)
_BOUNDARY_CHARS = re.compile(r"[0-9A-Za-z'()+_,./:=? -]+")
# Only these forms of content-disposition are accepted: a name, then at most a filename, both in quotes.
_DISPOSITION = re.compile(rb'form-data;\s*name="([^"\\\r\n]*)"(?:;\s*filename\*?=[^\r\n]*)?', re.I)
_SECOND_NAME = re.compile(rb";\s*name\*?\s*=", re.I)
_COUNT = re.compile(r"[0-9]{1,9}")
_READ_FIELDS = ("model", "stream", "n")  # that the gateway reads
_HINT = "send the form as curl -F or a client library does"


class FormField(msgspec.Struct, frozen=True):
    name: str
    start: int  # of the value within the body
    end: int
    is_file: bool


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _FORM_TYPE


def read_form(body: bytes, content_type: str) -> list[FormField]:
    """Return the form's fields. Raise InvalidRequest if the form is malformed or ambiguous."""
    delimiter = b"\r\n--" + _read_boundary(content_type)
    if not body.startswith(delimiter[2:] + b"\r\n"):
        raise _form_error("it does not begin with the boundary")
    fields: list[FormField] = []
    at = len(delimiter) - 2
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise _form_error("a boundary is followed by other bytes")
        if len(fields) == MAX_PARTS:
            raise _form_error(f"it has more than {MAX_PARTS} parts")
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEADER_BYTES)
        start = head_end + 4
        end = body.find(delimiter, start) if head_end >= 0 else -1
        if end < 0 or body.startswith(delimiter[2:], start):
            raise _form_error("a part has no header, no value or no end")
        fields.append(_read_part(body[at + 2 : head_end], start, end))
        at = end + len(delimiter)
    if body[at + 2 :].strip(b"\r\n"):
        raise _form_error("bytes follow its end")
    names = [field.name for field in fields]
    for name in _READ_FIELDS:
        if names.count(name) > 1:
            raise InvalidRequest(f"the form has the field {name} twice", param=name, hint="send the field once")
    return fields


def read_form_fields(body: bytes, content_type: str) -> BodyFields:
    """Return the fields of the form that the gateway needs."""
    values = {
        field.name: body[field.start : field.end].decode("utf-8", "replace")
        for field in read_form(body, content_type)
        if field.name in _READ_FIELDS and not field.is_file
    }
    fields = BodyFields(
        model=values.get("model"),
        stream=values.get("stream", "").lower() in ("true", "1"),
        n=_read_count(values["n"]) if "n" in values else None,
    )
    check_model_name(fields)
    return fields


def _read_count(value: str) -> int:
    if not _COUNT.fullmatch(value):
        raise InvalidRequest(f"n is {value[:40]!r}; it must be a whole number", param="n", hint="set n to 1 or more")
    return int(value)


def estimate_form_tokens(body: bytes, content_type: str) -> int:
    """Return the estimated number of input tokens of a form. Raise InvalidRequest if the form is malformed."""
    fields = read_form(body, content_type)
    text_bytes = sum(field.end - field.start for field in fields if not field.is_file)
    return max(1, text_bytes // BYTES_PER_TOKEN) + TOKENS_PER_ATTACHMENT * sum(field.is_file for field in fields)


def replace_form_model(body: bytes, content_type: str, model: str) -> bytes:
    """Return the form with another value of its field `model`. All other bytes stay."""
    field = next(field for field in read_form(body, content_type) if field.name == "model")
    return body[: field.start] + model.encode() + body[field.end :]


def _read_boundary(content_type: str) -> bytes:
    found = list(_BOUNDARY.finditer(content_type))
    boundary = (found[0]["quoted"] or found[0]["plain"]) if len(found) == 1 else ""
    if content_type.lower().count("boundary") != 1 or not _BOUNDARY_CHARS.fullmatch(boundary):
        raise InvalidRequest(
            f"the content-type {content_type[:100]!r} does not have exactly one valid boundary", hint=_HINT
        )
    return boundary.encode()


def _read_part(head: bytes, start: int, end: int) -> FormField:
    dispositions = []
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        lowered = name.strip().lower()
        if not colon or not name or name != name.strip() or any(byte in line for byte in b"\r\n\0"):
            raise _form_error("a part has a malformed header")
        if lowered == b"content-disposition":
            dispositions.append(value.strip())
        elif lowered == b"content-transfer-encoding" and value.strip().lower() not in (b"binary", b"8bit", b"7bit"):
            raise _form_error(f"a part has the content-transfer-encoding {value[:40].decode('latin-1')!r}")
    match = _DISPOSITION.fullmatch(dispositions[0]) if len(dispositions) == 1 else None
    if match is None:
        raise _form_error("a part does not have one content-disposition that begins with its name")
    rest = dispositions[0][match.end(1) + 1 :]
    if _SECOND_NAME.search(rest):
        raise _form_error("a part has two names")
    return FormField(match[1].decode("utf-8", "replace"), start, end, b"filename" in rest.lower())


def _form_error(why: str) -> InvalidRequest:
    return InvalidRequest(f"the multipart/form-data body is malformed: {why}", hint=_HINT)
