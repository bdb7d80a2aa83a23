"""Peek and edit: the few things of a request's body that the gateway itself needs. All else stays as it was written."""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.net.notjson import NOT_JSON

MODEL_LENGTH = 256


class Peek(msgspec.Struct):
    """Whatever is of another kind than expected is the provider's to refuse."""

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
        """Tokens of one answer."""
        for said in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if _counts(said):
                return said
        return self._generation("maxOutputTokens")

    @property
    def answers(self) -> int:
        """How many are wanted."""
        return self.n if _counts(self.n) else self._generation("candidateCount") or 1

    def _generation(self, name: str) -> int | None:
        said = self.generation.get(name) if isinstance(self.generation, dict) else None
        return said if _counts(said) else None

    @property
    def counts(self) -> bool:
        """The client wants its usage at a stream's end."""
        return isinstance(self.stream_options, dict) and self.stream_options.get("include_usage") is True


def _counts(said: Any) -> TypeGuard[int]:
    return type(said) is int and said > 0  # True is none


class _Name:
    """A key of an object: unlike text, no two are equal, so that none replaces another."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_NAMES = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, text: _Name(text))
_PEEK = msgspec.json.Decoder(Peek)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def peek(body: bytes) -> Peek:
    try:
        found = _PEEK.decode(body)
    except NOT_JSON as e:
        raise InvalidRequest(f"the body is not a JSON object: {e}") from e
    check_names(body)
    if isinstance(found.model, str) and len(found.model) > MODEL_LENGTH:
        raise InvalidRequest(
            f"model has {len(found.model)} characters; at most {MODEL_LENGTH} are taken", param="model"
        )
    return found


def check_names(body: bytes) -> None:
    """Raises InvalidRequest if a JSON object has a key twice at its top level: the gateway decides by the last one, and
    a provider may go by the first."""
    # What is written again is never longer: keys have their shortest form, values are copied. Of the same length, as
    # compact JSON is, it has all keys. That takes a third of the time of looking at each of them.
    if len(msgspec.json.encode(_FIELDS.decode(body))) == len(body):
        return
    seen = set()
    for name in _NAMES.decode(body):
        if name.text in seen:
            raise InvalidRequest(
                f"the body has the key {name.text[:100]!r} twice", param=name.text[:100], hint="write it once"
            )
        seen.add(name.text)


def edited(body: bytes, **changes: Any) -> bytes:
    """The same JSON object with other values for some of its fields; the rest keeps its bytes and its order."""
    fields: dict[str, Any] = dict(_FIELDS.decode(body))
    fields.update(changes)
    return msgspec.json.encode(fields)


def canonical(body: bytes) -> bytes:
    """The same for the same JSON, however it is written; with what is no plain JSON, its own bytes."""
    try:
        found = msgspec.json.decode(body)
        sorted_ = msgspec.json.encode(found, order="deterministic")
    except NOT_JSON:
        return b"bytes:" + body
    # Quotes are as many in both unless a name was there twice; but a quote may hide in an escape.
    if body.count(b'"') != sorted_.count(b'"') or b"\\u0022" in body:
        return b"bytes:" + body
    return b"json:" + sorted_
