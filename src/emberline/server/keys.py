"""Who may call: clients by their API keys, the parts of a cluster by the cluster key."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
from collections.abc import Iterable

from emberline.core.errors import ClusterCallForbidden, Unauthorized, WrongClusterKey
from emberline.server.exchange import Exchange

# Headers that a proxy adds, our gateway among them: the call's sender is then another than the connection's peer.
PROXY_HEADERS = (b"via", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")


def authorize(x: Exchange, keys: Iterable[str]) -> None:
    """Raises Unauthorized unless the call carries one of the API keys."""
    if not _matches(_bearer(x), keys):
        raise Unauthorized("the API key is missing or wrong", hint="send Authorization: Bearer KEY")


def admit(x: Exchange, cluster_key: str | None) -> None:
    """Raises an error unless the call comes straight from a part of the cluster: with its key or, where the cluster
    has none, from this machine. Cluster calls show what clients write, and decide where their requests go: a web page
    never makes them, nor does a proxy, which would lend its own address to anyone behind it."""
    if x.header("origin"):
        raise ClusterCallForbidden("cluster calls from web pages are refused")
    if (name := next((name for name in PROXY_HEADERS if name in x.headers), None)) is not None:
        raise ClusterCallForbidden(
            f"cluster calls through a proxy are refused: this one has the header {name.decode()!r}",
            hint="call the router or worker at its own address",
        )
    if cluster_key is not None:
        if not _matches(_bearer(x), (cluster_key,)):
            raise WrongClusterKey(
                "the cluster key is missing or wrong",
                hint="set EMBERLINE_CLUSTER_KEY, or --cluster-key, to the router's",
            )
    elif not is_loopback(x.client):
        raise ClusterCallForbidden(
            "without a cluster key, cluster calls are taken from this machine only",
            hint="start router and workers with EMBERLINE_CLUSTER_KEY",
        )


def is_loopback(address: str) -> bool:
    """Whether an IP address, in IPv6 with or without its zone, is this machine's own."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(parsed, "ipv4_mapped", None)
        return (mapped or parsed).is_loopback
    return False


def _bearer(x: Exchange) -> str:
    return x.header("x-api-key") or x.header("authorization").removeprefix("Bearer ")


def _matches(given: str, keys: Iterable[str]) -> bool:
    """All keys are compared, each in constant time, so that timing tells nothing about them."""
    return bool(sum(hmac.compare_digest(given.encode(), key.encode()) for key in keys))
