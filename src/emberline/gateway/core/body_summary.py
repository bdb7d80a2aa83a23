"""BodySummary: the fields, the estimated tokens and the hash of a large request body.

The summary is computed once, in a child process, so that no layer (middleware) decodes the body on the event loop.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request_body import BodyFields, canonicalize_body, read_body_fields
from emberline.gateway.core.token_estimate import estimate_input_tokens

MAX_NESTED_FIELDS = 64  # of stream_options and generationConfig; a larger object is dropped


class BodySummary(msgspec.Struct, frozen=True):
    body_fields: BodyFields | None  # None: the body is invalid
    error: str  # the reason, if the body is invalid
    input_tokens: int  # estimate
    canonical_digest: bytes


def summarize_body(body: bytes) -> BodySummary:
    """Return the summary of a request body, which may be invalid JSON."""
    fields, error = None, ""
    try:
        fields = _without_large_values(read_body_fields(body))
    except InvalidRequest as e:
        error = e.message
    digest = hashlib.sha256(canonicalize_body(body)).digest()
    return BodySummary(fields, error, estimate_input_tokens(body), b"sha256:" + digest)


def _without_large_values(fields: BodyFields) -> BodyFields:
    """Return the fields with lists, long strings and large objects replaced by None.

    Such values could be too large to copy between processes.
    """
    return BodyFields(
        *(_drop_large_value(getattr(fields, name), keep_objects=True) for name in BodyFields.__struct_fields__)
    )


def _drop_large_value(value: Any, *, keep_objects: bool = False) -> Any:
    if isinstance(value, dict) and keep_objects and len(value) <= MAX_NESTED_FIELDS:
        return {key: _drop_large_value(inner) for key, inner in value.items() if len(key) < 256}
    return value if value is None or isinstance(value, (bool, int, float)) or (
        isinstance(value, str) and len(value) < 4096
    ) else None  # fmt: skip
