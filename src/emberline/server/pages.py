"""The files of the playground and of the router's status page, read once."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    kind: str


def load_pages(home: str = "index.html") -> dict[str, Page]:
    """URL path to content: `/` is the playground, or another page; the rest of web/ lies under /static/."""
    pages = {}
    for item in files("emberline").joinpath("web").iterdir():
        if item.is_file() and not item.name.endswith(".py"):
            kind = mimetypes.guess_type(item.name)[0] or "application/octet-stream"
            kind = "text/javascript" if item.name.endswith((".js", ".mjs")) else kind
            page = Page(item.read_bytes(), f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
            pages["/" if item.name == home else f"/static/{item.name}"] = page
    return pages
