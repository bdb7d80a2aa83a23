"""Peek and edit: the few things of a request's body that the gateway itself needs. All else stays as it was written."""

from __future__ import annotations

import json
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
    """Raises InvalidRequest if an object anywhere in a JSON body has a key twice: the gateway decides by the last one,
    and a provider may go by the first."""
    try:
        same = _has_same_quotes(body, msgspec.json.encode(msgspec.json.decode(body)))
    except NOT_JSON:  # such as bytes that are no UTF-8, which are the provider's to refuse
        same = False
    if not same:
        text = body.decode("utf-8", "replace")
        try:
            json.loads(text, object_pairs_hook=_check_pairs, parse_int=len, strict=False)  # of any number of digits
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"the body is not JSON: {e}") from e


def _has_same_quotes(body: bytes, encoded: bytes) -> bool:
    """Whether no object can have had a key twice: quotes are as many before it was decoded as after, unless a quote
    hides in an escape. This takes a tenth of the time that looking at each object does."""
    return body.count(b'"') == encoded.count(b'"') and b"\\u0022" not in body


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequest(f"the body has the key {name[:100]!r} twice", param=name[:100], hint="write it once")
        seen.add(name)


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
    if not _has_same_quotes(body, sorted_):
        return b"bytes:" + body
    return b"json:" + sorted_
