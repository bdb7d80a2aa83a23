"""parse_router_urls and normalise_router_url: the URLs of the routers with which a worker registers."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest

LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")
HINT = "write --router http://HOST:PORT, once for each router"


def parse_router_urls(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the URLs in `texts`, each of which may hold several, separated by commas.

    Raises InvalidRequest for an empty URL, a URL that is not valid for a router, and a router that is named twice."""
    urls: list[str] = []
    seen: set[str] = set()
    for text in texts:
        for url in (each.strip().rstrip("/") for each in text.split(",")):
            if (origin := normalise_router_url(url)) in seen:
                raise InvalidRequest(f"the router {url} is named twice", param="router", hint="name each router once")
            seen.add(origin)
            urls.append(url)
    return tuple(urls)


def normalise_router_url(url: str) -> str:
    """Return one URL for all spellings of a router's URL, so that two commands can tell that they mean the same router.

    The case of the host, a default port, a slash at the end and the spelling of an IP address make no difference. The
    names of this machine's loopback interface, localhost, 127.0.0.1, [::1] and 0.0.0.0, count as one name. Other names
    are not resolved. Raises InvalidRequest if the URL is not http or https, has no host, or has a user name or
    password."""
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
    return f"{parts.scheme}://{_normalise_host(parts.hostname)}:{port}{parts.path.rstrip('/')}"


def _normalise_host(host: str) -> str:
    name = host.lower().rstrip(".")
    if name in LOOPBACK_NAMES:
        return "localhost"
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    # Only the usual address of the interface: another one, such as 127.0.0.2, may be that of another router.
    is_loopback = address.is_unspecified or str(address) in LOOPBACK_ADDRESSES
    return "localhost" if is_loopback else f"[{address}]" if address.version == 6 else str(address)
