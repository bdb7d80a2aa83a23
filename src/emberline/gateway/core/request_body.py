"""Reading and editing the few fields of a request body that the gateway needs."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS

MAX_MODEL_NAME_CHARS = 256


class BodyFields(msgspec.Struct):
    """The body's fields that the gateway reads.

    A value of an unexpected type counts as absent here; the provider refuses it.
    """

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    stream_options: Any = None
    n: Any = None
    generation: Any = msgspec.field(default=None, name="generationConfig")  # Gemini's

    @property
    def max_output(self) -> int | None:
        """Return the limit on output tokens of one choice, or None if the body has none."""
        for limit in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if _is_positive_int(limit):
                return limit
        return self._generation_int("maxOutputTokens")

    @property
    def choice_count(self) -> int:
        """Return the number of choices that the client requests."""
        return self.n if _is_positive_int(self.n) else self._generation_int("candidateCount") or 1

    def _generation_int(self, name: str) -> int | None:
        value = self.generation.get(name) if isinstance(self.generation, dict) else None
        return value if _is_positive_int(value) else None

    @property
    def wants_usage(self) -> bool:
        """Return whether the client requests usage at the end of a stream."""
        return isinstance(self.stream_options, dict) and self.stream_options.get("include_usage") is True


def _is_positive_int(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0  # True is not an int here


_BODY_FIELDS = msgspec.json.Decoder(BodyFields)
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_body_fields(body: bytes) -> BodyFields:
    """Read the fields. Raise InvalidRequest if the body is not a JSON object or repeats a key."""
    try:
        found = _BODY_FIELDS.decode(body)
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(f"the body is not a JSON object: {e}") from e
    check_duplicate_keys(body)
    if isinstance(found.model, str) and len(found.model) > MAX_MODEL_NAME_CHARS:
        raise InvalidRequest(
            f"model is too long: {len(found.model)} characters, at most {MAX_MODEL_NAME_CHARS} are allowed",
            param="model",
        )
    return found


def check_duplicate_keys(body: bytes) -> None:
    """Raise InvalidRequest if an object anywhere in a JSON body has the same key twice.

    The gateway uses the last of the two values, and a provider may use the first.
    """
    try:
        same = _has_same_quotes(body, msgspec.json.encode(msgspec.json.decode(body)))
    except JSON_DECODE_ERRORS:  # for example invalid UTF-8, which the provider refuses
        same = False
    if not same:
        text = body.decode("utf-8", "replace")
        try:
            # parse_int=len: int() refuses numbers with very many digits
            json.loads(text, object_pairs_hook=_check_pairs, parse_int=len, strict=False)
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"the body is not JSON: {e}") from e


def _has_same_quotes(body: bytes, encoded: bytes) -> bool:
    """Return whether encoding kept the number of quotes, which shows that no object repeats a key.

    A body with an escaped quote counts as different. This takes a tenth of the time that checking each object does.
    """
    return body.count(b'"') == encoded.count(b'"') and b"\\u0022" not in body


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise InvalidRequest(
                f"an object in the body has the key {name[:100]!r} twice", param=name[:100], hint="write it once"
            )
        names.add(name)


def replace_fields(body: bytes, **changes: Any) -> bytes:
    """Return the JSON object with some fields replaced; the others keep their bytes and their order."""
    fields: dict[str, Any] = dict(_RAW_FIELDS.decode(body))
    fields.update(changes)
    return msgspec.json.encode(fields)


def canonical_body(body: bytes) -> bytes:
    """Return bytes that are equal for equal JSON, whatever its spacing and order of keys.

    For a body that is not JSON they are the body itself.
    """
    try:
        found = msgspec.json.decode(body)
        encoded = msgspec.json.encode(found, order="deterministic")
    except JSON_DECODE_ERRORS:
        return b"bytes:" + body
    if not _has_same_quotes(body, encoded):
        return b"bytes:" + body
    return b"json:" + encoded
