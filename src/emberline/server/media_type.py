"""Checks that a request with a JSON body has the content-type of JSON.

This protects against web pages of other sites. They can send text/plain, forms and bodies without a content-type.
Before they can send application/json, the browser asks the server for permission (a CORS preflight)."""

from __future__ import annotations

from emberline.core.errors import UnsupportedMediaType


def is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def require_json(content_type: str) -> None:
    """Raise UnsupportedMediaType if the content-type is not JSON."""
    if not is_json(content_type):
        state = f"is {content_type[:100]!r}" if content_type else "is missing"
        raise UnsupportedMediaType(
            f"the content-type {state}; the body must be JSON", hint="add -H 'content-type: application/json'"
        )
