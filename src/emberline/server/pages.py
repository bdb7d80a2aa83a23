"""The static files of the playground, the router's status page and the gateway's dashboard."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class StaticPage:
    body: bytes
    content_type: str


def load_pages(index: str = "index.html") -> dict[str, StaticPage]:
    """Return the static files by URL path.

    The file `index` is served at `/`. All other files in web/ and in the directory of `index` are served under
    /static/.
    """
    index_folder = index.rpartition("/")[0]
    web = files("emberline").joinpath("web")
    pages = {}
    for folder in dict.fromkeys(("", index_folder)):
        for item in web.joinpath(folder).iterdir():
            name = f"{folder}/{item.name}" if folder else item.name
            if item.is_file() and not name.endswith(".py"):
                pages["/" if name == index else f"/static/{name}"] = StaticPage(item.read_bytes(), _content_type(name))
    return pages


def _content_type(name: str) -> str:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    kind = "text/javascript" if name.endswith((".js", ".mjs")) else kind
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
