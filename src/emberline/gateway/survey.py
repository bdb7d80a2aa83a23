"""Survey: what the gateway needs to know of a large body, read once in another process. The layers then ask the call,
and none of them decodes the body on the event loop."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.body import Peek, canonical, peek
from emberline.gateway.costs.estimate import estimated_input

MOST_FIELDS = 64  # of an object that is kept of a body: stream_options and generationConfig


class Survey(msgspec.Struct, frozen=True):
    seen: Peek | None  # None: the body is no JSON object, or names a model that is too long
    error: str  # why
    tokens: int  # of its input, about
    canonical: bytes  # a digest of it


def survey(body: bytes) -> Survey:
    seen, error = None, ""
    try:
        seen = _small(peek(body))
    except InvalidRequest as e:
        error = e.message
    digest = hashlib.sha256(canonical(body)).digest()
    return Survey(seen, error, estimated_input(body), b"sha256:" + digest)


def _small(seen: Peek) -> Peek:
    """Without values that no field of this kind has: they need not come back from the other process."""
    return Peek(*(_scalar(getattr(seen, name), dive=True) for name in Peek.__struct_fields__))


def _scalar(value: Any, *, dive: bool = False) -> Any:
    if isinstance(value, dict) and dive and len(value) <= MOST_FIELDS:
        return {key: _scalar(inner) for key, inner in value.items() if len(key) < 256}
    return value if value is None or isinstance(value, (bool, int, float)) or (
        isinstance(value, str) and len(value) < 4096
    ) else None  # fmt: skip
