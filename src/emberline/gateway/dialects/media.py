"""Helpers for images, audio and documents: data URLs and MIME types."""

from __future__ import annotations

_SUFFIXES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
    "heic": "image/heic",
    "pdf": "application/pdf",
    "txt": "text/plain",
    "md": "text/markdown",
    "csv": "text/csv",
    "json": "application/json",
    "html": "text/html",
}


def split_data_url(url: str) -> tuple[str, str] | None:
    """Return (MIME type, base64 data) of a data URL; None for any other URL or encoding."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    mime = head[len("data:") : -len(";base64")]
    return (mime or "text/plain"), data


def make_data_url(mime: str, data: str) -> str:
    return f"data:{mime};base64,{data}"


def guess_mime_type(name: str) -> str:
    """Return the MIME type for the suffix of a file name or URL; "" if it is unknown."""
    path = name.partition("?")[0].partition("#")[0]
    return _SUFFIXES.get(path.rpartition(".")[2].lower(), "")
