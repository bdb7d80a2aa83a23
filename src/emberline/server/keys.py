"""Who may call: clients by their API keys, the parts of a cluster by the cluster key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from emberline.core.errors import ClusterCallForbidden, Unauthorized, WrongClusterKey
from emberline.server.exchange import Exchange

# Headers that a proxy adds, our gateway among them: the call's sender is then another than the connection's peer.
PROXY_HEADERS = (b"via", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")

CLUSTER_KEY_HEADER = "x-emberline-cluster-key"  # a router's, beside the client's own key


def tenant_of(x: Exchange) -> str:
    """A name for the client's key that does not tell the key: what is cached for one tenant is not used for another."""
    key = _bearer(x)
    return hashlib.sha256(b"emberline tenant\0" + key.encode()).hexdigest()[:32] if key else ""


@dataclass(frozen=True, slots=True)
class Access:
    """The keys of a server, and which calls need which."""

    api_keys: tuple[str, ...] = ()
    cluster_key: str | None = None
    closed: bool = False  # clients without a key are refused even where no API key was configured: only a router calls

    def check(self, x: Exchange, needs: str) -> None:
        """`needs`: as a Route says. Raises an error if the call may not be made."""
        if needs == "cluster":
            admit(x, self.cluster_key)
        elif needs != "nothing" and (self.api_keys or self.closed):
            self._check_client(x, by_cluster_key=needs == "operator")

    def _check_client(self, x: Exchange, *, by_cluster_key: bool) -> None:
        if _matches(_bearer(x), self.api_keys):
            return
        if self.cluster_key is not None:
            given = [x.header(CLUSTER_KEY_HEADER), *([_bearer(x)] if by_cluster_key else [])]
            if any(_matches(each, (self.cluster_key,)) for each in given):
                return
        if self.api_keys:
            raise Unauthorized("the API key is missing or wrong", hint="send Authorization: Bearer KEY")
        raise WrongClusterKey(
            "this worker answers its router only: the cluster key is missing or wrong",
            hint="call the router, start the worker with --api-key, or with --open",
        )


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
