"""BodySummary: what the layers need to know about a large request body.

It is computed once, in another process, so that no layer decodes a large body on the event loop.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.body import Peek, canonical, peek
from emberline.gateway.costs.estimate import estimated_input

MOST_FIELDS = 64  # of stream_options and generationConfig; a larger object is dropped


class Survey(msgspec.Struct, frozen=True):
    seen: Peek | None  # None: the body is invalid
    error: str  # the reason, if the body is invalid
    tokens: int  # estimate
    canonical: bytes


def survey(body: bytes) -> Survey:
    """Return the summary of a body, valid or not."""
    fields, error = None, ""
    try:
        fields = _without_large_values(peek(body))
    except InvalidRequest as e:
        error = e.message
    digest = hashlib.sha256(canonical(body)).digest()
    return Survey(fields, error, estimated_input(body), b"sha256:" + digest)


def _without_large_values(fields: Peek) -> Peek:
    """Return the fields without values of invalid types, which may be large to copy between processes."""
    return Peek(*(_small_value(getattr(fields, name), nested=True) for name in Peek.__struct_fields__))


def _small_value(value: Any, *, nested: bool = False) -> Any:
    if isinstance(value, dict) and nested and len(value) <= MOST_FIELDS:
        return {key: _small_value(inner) for key, inner in value.items() if len(key) < 256}
    return value if value is None or isinstance(value, (bool, int, float)) or (
        isinstance(value, str) and len(value) < 4096
    ) else None  # fmt: skip
