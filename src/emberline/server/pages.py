"""The files of the playground, of the router's status page and of the gateway's dashboard, read once."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    kind: str


def load_pages(home: str = "index.html") -> dict[str, Page]:
    """URL path to content: `/` is the playground, or another page; the rest of web/ lies under /static/, and so do the
    files of the folder that the page is in."""
    room = home.rpartition("/")[0]
    web = files("emberline").joinpath("web")
    pages = {}
    for folder in dict.fromkeys(("", room)):
        for item in web.joinpath(folder).iterdir():
            name = f"{folder}/{item.name}" if folder else item.name
            if item.is_file() and not name.endswith(".py"):
                pages["/" if name == home else f"/static/{name}"] = Page(item.read_bytes(), _kind(name))
    return pages


def _kind(name: str) -> str:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    kind = "text/javascript" if name.endswith((".js", ".mjs")) else kind
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
