"""Access control: clients by their API keys, routers and workers by the cluster key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from emberline.core.errors import ClusterCallForbidden, Unauthorized, WrongClusterKey
from emberline.server.exchange import Exchange

# Headers that a proxy adds, Emberline's gateway too: the connection's peer is then not the caller.
PROXY_HEADERS = (b"via", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")

CLUSTER_KEY_HEADER = "x-emberline-cluster-key"  # sent by a router beside the client's own key


def tenant_id(x: Exchange) -> str:
    """Return an identifier of the client's key from which the key cannot be derived.

    Cached prompts of one tenant are never used for another."""
    key = _presented_key(x)
    return hashlib.sha256(b"emberline tenant\0" + key.encode()).hexdigest()[:32] if key else ""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The keys of a server, and which calls need which."""

    api_keys: tuple[str, ...] = ()
    cluster_key: str | None = None
    # Only calls with the cluster key are accepted, although no API key is configured.
    requires_cluster_key: bool = False

    def check(self, x: Exchange, needs: str) -> None:
        """Raise an error unless the caller may use a route. `needs`: HTTPRoute.required_key."""
        if needs == "cluster":
            check_cluster_caller(x, self.cluster_key)
        elif needs != "nothing" and (self.api_keys or self.requires_cluster_key):
            self._check_client(x, accepts_cluster_key=needs == "operator")

    def _check_client(self, x: Exchange, *, accepts_cluster_key: bool) -> None:
        if _matches(_presented_key(x), self.api_keys):
            return
        if self.cluster_key is not None:
            presented = [x.header(CLUSTER_KEY_HEADER), *([_presented_key(x)] if accepts_cluster_key else [])]
            if any(_matches(key, (self.cluster_key,)) for key in presented):
                return
        if self.api_keys:
            raise Unauthorized("the API key is missing or wrong", hint="send Authorization: Bearer KEY")
        raise WrongClusterKey(
            "this worker accepts calls from its router only: the cluster key is missing or wrong",
            hint="call the router, or start the worker with --api-key KEY or --open",
        )


def check_cluster_caller(x: Exchange, cluster_key: str | None) -> None:
    """Raise an error unless the call comes directly from a router or worker of the cluster.

    It must carry the cluster key or, where the cluster has none, come from this machine. Cluster calls show clients'
    prompts and decide where requests go, so web pages may not make them, nor proxies, which would lend their own
    address to any client behind them."""
    if x.header("origin"):
        raise ClusterCallForbidden(
            "a web page made this cluster call: it has an Origin header",
            hint="call the router or worker from a program",
        )
    if (name := next((name for name in PROXY_HEADERS if name in x.headers), None)) is not None:
        raise ClusterCallForbidden(
            f"this cluster call came through a proxy: it has the header {name.decode()!r}",
            hint="call the router or worker directly, at its own address",
        )
    if cluster_key is not None:
        if not _matches(_presented_key(x), (cluster_key,)):
            raise WrongClusterKey(
                "the cluster key is missing or wrong",
                hint="set EMBERLINE_CLUSTER_KEY or --cluster-key to the router's key",
            )
    elif not is_loopback(x.client):
        raise ClusterCallForbidden(
            f"no cluster key is set, so cluster calls are accepted from this machine only, not {x.client[:100]}",
            hint="start the router and its workers with the same EMBERLINE_CLUSTER_KEY",
        )


def is_loopback(address: str) -> bool:
    """Whether an IP address, in IPv6 with or without its zone, is this machine's own."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(parsed, "ipv4_mapped", None)
        return (mapped or parsed).is_loopback
    return False


def _presented_key(x: Exchange) -> str:
    return x.header("x-api-key") or x.header("authorization").removeprefix("Bearer ")


def _matches(given: str, keys: Iterable[str]) -> bool:
    """Compare with all keys, each in constant time, so that timing reveals nothing about them."""
    return bool(sum(hmac.compare_digest(given.encode(), key.encode()) for key in keys))
