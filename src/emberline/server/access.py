"""Access control: clients need an API key; routers and workers need the cluster key."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from emberline.core.errors import ClusterCallForbidden, RequestForbidden, Unauthorized, WrongClusterKey
from emberline.core.fair_threads import current_client
from emberline.core.tenants import TENANT_SALT_HEADER, make_tenant
from emberline.core.tls import match_names
from emberline.core.tls_config import TLSConfig
from emberline.server.exchange import Exchange

# Headers that a proxy adds, Emberline's gateway too: the connection's peer is then not the caller.
PROXY_HEADERS = (b"via", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")

CLUSTER_KEY_HEADER = "x-emberline-cluster-key"  # sent by a router beside the client's own key


def derive_tenant_id(exchange: Exchange, *, with_key: bool = True) -> str:
    """Return the client's tenant: a hash of its API key and of a gateway's tenant salt, or "" if it has neither.

    Cached prompts of one tenant are never used for a different tenant. `with_key`: the server requires API keys;
    otherwise clients may send any key, which is not part of the tenant."""
    key = _presented_key(exchange) if with_key else ""
    salt = exchange.header(TENANT_SALT_HEADER)
    return make_tenant(key, salt) if key or salt else ""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The keys of a server, and the check that a request has the key that its route requires."""

    api_keys: tuple[str, ...] = ()
    cluster_keys: tuple[str, ...] = ()
    # Only calls with the cluster key are accepted, although no API key is configured.
    requires_cluster_key: bool = False
    admin_keys: tuple[str, ...] = ()  # accepted wherever an API key is
    tls: TLSConfig | None = None  # with a CA, calls between router and workers need a certificate of a cluster peer

    def check(self, exchange: Exchange, required_key: str) -> None:
        """Raise an error unless the request has the key that its route requires.

        `required_key` is the field HTTPRoute.required_key: "key" stands for an API key, "operator" for an API key or
        the cluster key, "admin" for the admin key, "cluster" for the cluster key, "nothing" for no key.
        """
        if required_key == "admin":
            self._check_admin(exchange)
        elif required_key == "cluster":
            check_cluster_caller(exchange, self.cluster_keys)
            self._check_peer_certificate(exchange)
        elif required_key != "nothing" and (self.api_keys or self.requires_cluster_key):
            self._check_client(exchange, accepts_cluster_key=required_key == "operator")

    def _check_client(self, exchange: Exchange, *, accepts_cluster_key: bool) -> None:
        if _matches_any_key(_presented_key(exchange), (*self.api_keys, *self.admin_keys)):
            current_client.set(_presented_key(exchange).encode())
            return
        if _matches_any_key(exchange.header(CLUSTER_KEY_HEADER), self.cluster_keys):
            self._check_peer_certificate(exchange)
            current_client.set(_presented_key(exchange).encode())  # which the router has checked
            return
        # A program that reads metrics, such as Prometheus, needs no certificate unless every connection needs one.
        if accepts_cluster_key and _matches_any_key(_presented_key(exchange), self.cluster_keys):
            return
        if self.api_keys:
            raise Unauthorized("the API key is missing or wrong", hint="send Authorization: Bearer KEY")
        raise WrongClusterKey(
            "this worker accepts calls from its router only: the cluster key is missing or wrong",
            hint="call the router, or start the worker with --api-key KEY or --open",
        )

    def _check_admin(self, exchange: Exchange) -> None:
        if not self.admin_keys:
            raise RequestForbidden(
                f"{exchange.path} is off: this server has no admin key",
                hint="start it with EMBERLINE_ADMIN_KEY or --admin-key KEY",
            )
        if not _matches_any_key(_presented_key(exchange), self.admin_keys):
            raise Unauthorized("the admin key is missing or wrong", hint="send Authorization: Bearer ADMIN_KEY")

    def _check_peer_certificate(self, exchange: Exchange) -> None:
        """Raise an error unless the connection has the certificate of a cluster peer, where one is required."""
        if self.tls is None or self.tls.ca is None:
            return
        names = exchange.client_cert_names
        if names is None:
            raise ClusterCallForbidden(
                f"the cluster call {exchange.path} came without a client certificate",
                hint="start the caller with --tls-cert, --tls-key and --tls-ca",
            )
        if self.tls.peer_names and not match_names(names, self.tls.peer_names):
            raise ClusterCallForbidden(
                f"the caller's certificate has the names {', '.join(names)[:200] or 'none'}, none of them allowed",
                hint="add its name to --tls-names, or use a certificate with one of those names",
            )


def check_cluster_caller(exchange: Exchange, cluster_keys: tuple[str, ...]) -> None:
    """Raise an error unless the request comes directly from a router or worker of the cluster.

    The request must have one of the cluster keys. If there are none, it must come from this machine. Requests from web
    pages and through proxies are rejected: cluster requests show clients' prompts and control the routing, and a proxy
    on this machine would make any client look local."""
    if exchange.header("origin"):
        raise ClusterCallForbidden(
            "a web page made this cluster call: it has an Origin header",
            hint="call the router or worker from a program",
        )
    if (name := next((name for name in PROXY_HEADERS if name in exchange.headers), None)) is not None:
        raise ClusterCallForbidden(
            f"this cluster call came through a proxy: it has the header {name.decode()!r}",
            hint="call the router or worker directly, at its own address",
        )
    if cluster_keys:
        if not _matches_any_key(_presented_key(exchange), cluster_keys):
            raise WrongClusterKey(
                "the cluster key is missing or wrong",
                hint="set EMBERLINE_CLUSTER_KEY or --cluster-key to the router's key",
            )
    elif not is_loopback(exchange.client):
        raise ClusterCallForbidden(
            f"no cluster key is set, so only this machine may make cluster calls, but {exchange.client[:100]} made one",
            hint="start the router and its workers with the same EMBERLINE_CLUSTER_KEY",
        )


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address. An IPv6 address may include a zone, as in fe80::1%eth0."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(parsed, "ipv4_mapped", None)
        return (mapped or parsed).is_loopback
    return False


def has_key(exchange: Exchange) -> bool:
    """Return whether the request has a key, be it right or wrong."""
    return bool(_presented_key(exchange) or exchange.header(CLUSTER_KEY_HEADER))


def _presented_key(exchange: Exchange) -> str:
    return exchange.header("x-api-key") or exchange.header("authorization").removeprefix("Bearer ")


def _matches_any_key(presented_key: str, keys: Iterable[str]) -> bool:
    """Return whether the presented key is one of the keys. The comparison takes constant time."""
    return bool(sum(hmac.compare_digest(presented_key.encode(), key.encode()) for key in keys))
