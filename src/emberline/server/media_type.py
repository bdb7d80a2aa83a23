"""require_json: the content-type that a JSON body must have.

Another site's web page can send text/plain, forms and bodies without a type. Before it may send application/json, its
browser asks the server for permission (a CORS preflight)."""

from __future__ import annotations

from emberline.core.errors import UnsupportedMediaType


def is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def require_json(content_type: str) -> None:
    """Raise UnsupportedMediaType unless this content-type is JSON."""
    if not is_json(content_type):
        state = f"is {content_type[:100]!r}" if content_type else "is missing"
        raise UnsupportedMediaType(
            f"the content-type {state}; the body must be JSON", hint="add -H 'content-type: application/json'"
        )
