"""require_json: the content-type that a body of JSON must have. A web page of another site can send text/plain, forms
and bodies without a type; before it sends application/json, its browser asks the server for permission."""

from __future__ import annotations

from emberline.core.errors import UnsupportedMediaType


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def require_json(content_type: str) -> None:
    """Raises UnsupportedMediaType unless a body of this content-type is JSON."""
    if not is_json(content_type):
        given = f"is {content_type[:100]!r}" if content_type else "is missing"
        raise UnsupportedMediaType(
            f"the content-type {given}; the body must be JSON", hint="add -H 'content-type: application/json'"
        )
