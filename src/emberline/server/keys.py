"""Who may ask: clients by their keys, the parts of a cluster by its own."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from emberline.core.errors import Unauthorized
from emberline.server.exchange import Exchange


def presented_key(x: Exchange) -> str:
    return x.header("x-api-key") or x.header("authorization").removeprefix("Bearer ")


def tenant_of(x: Exchange) -> str:
    """A name for the client's key that does not tell the key: what is cached for one tenant is not used for another."""
    key = presented_key(x)
    return hashlib.sha256(b"emberline tenant\0" + key.encode()).hexdigest()[:32] if key else ""


def authorize(x: Exchange, keys: Iterable[str]) -> None:
    given = presented_key(x)
    # All are compared, in constant time each, so that timing tells nothing about them.
    if not sum(hmac.compare_digest(given.encode(), key.encode()) for key in keys):
        raise Unauthorized("the API key is missing or wrong", hint="send Authorization: Bearer KEY")


def admit(x: Exchange, cluster_key: str | None) -> None:
    """Parts of a cluster see what clients write: that takes its key or, without one, to be on this machine. It is never
    for a page in a browser."""
    if x.header("origin"):
        raise Unauthorized("this is not for pages in a browser")
    if cluster_key is not None:
        authorize(x, (cluster_key,))
    elif not _is_local(x.client):
        raise Unauthorized("others than this machine need a key", hint="start router and workers with a cluster key")


def _is_local(client: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(client).is_loopback
    return False
