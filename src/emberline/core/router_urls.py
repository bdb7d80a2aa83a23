"""parse_router_urls: checks the URLs of the routers with which a worker registers."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest

HINT = "write --router http://HOST:PORT, once for each router"


def parse_router_urls(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the URLs in `texts`, each of which may hold several, separated by commas.

    Raises InvalidRequest for a text without a URL, a URL that is not one of a router, and a router named twice."""
    urls: list[str] = []
    seen: set[tuple[str, str | None, int | None]] = set()
    for text in texts:
        for url in (each.strip().rstrip("/") for each in text.split(",")):
            key = _parse_origin(url)
            if key in seen:
                raise InvalidRequest(f"the router {url} is named twice", param="router", hint="name each router once")
            seen.add(key)
            urls.append(url)
    return tuple(urls)


def _parse_origin(url: str) -> tuple[str, str | None, int | None]:
    if "@" in url:  # logs and metrics would show the password
        message = "a router's URL has a user name or password, which routers do not use"
        raise InvalidRequest(message, param="router", hint="set EMBERLINE_CLUSTER_KEY to the router's key")
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as e:
        raise InvalidRequest(f"router is {url[:200]!r}, which is not a URL: {e}", param="router", hint=HINT) from e
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"router is {url[:200]!r}; it must be an http or https URL with a host", param="router", hint=HINT
        )
    return parts.scheme, parts.hostname, port
