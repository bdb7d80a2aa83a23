"""Protection against server-side request forgery: custom providers must be at public addresses.

`PublicResolver` resolves a name only if all its addresses are public. `open_public_socket` checks the address again
when the connection is made, so that neither an address written as a number (which is not resolved) nor a name that
resolves differently the second time circumvents the check.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from emberline.core.errors import InvalidRequest

# Networks to reject that `ipaddress` treats as global in some supported Python version.
_NON_PUBLIC_NETWORKS = tuple(
    ip_network(each)
    for each in (
        "168.63.129.16/32",  # Azure's metadata and host services, on a public address
        "192.0.0.0/24",  # protocol assignments; Oracle Cloud's metadata
        "192.88.99.0/24",  # 6to4 relays
        "::/96",  # deprecated IPv4-compatible IPv6 addresses
        "64:ff9b:1::/48",  # NAT64 into a private network
        "2001::/23",  # Teredo and others
        "2002::/16",  # 6to4: embeds any IPv4 address
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",
    )
)
_NAT64 = ip_network("64:ff9b::/96")
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9-]{0,61}[a-z0-9])?\.?", re.I
)
_NUMERIC_LABEL = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?", re.I)
_MAX_URL_CHARACTERS = 2048


def is_public(address: str) -> bool:
    try:
        ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = IPv4Address(int(ip) & 0xFFFFFFFF)
    if any(ip.version == network.version and ip in network for network in _NON_PUBLIC_NETWORKS):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_link_local or ip.is_unspecified)


def validate_provider_url(url: str, *, allow_private: bool = False, param: str = "base_url") -> str:
    """Return the URL without a trailing slash; raise InvalidRequest if a provider must not be there.

    `allow_private`: the operator allows providers at private addresses and over plain HTTP.
    """

    def invalid(problem: str, hint: str | None = None) -> InvalidRequest:
        return InvalidRequest(f"{param} {problem}", param=param, hint=hint)

    if len(url) > _MAX_URL_CHARACTERS or not url.isascii() or any(c <= " " or c in '\\"<>^`{|}\x7f' for c in url):
        raise invalid(
            f"is longer than {_MAX_URL_CHARACTERS} characters, or has characters that a URL cannot contain",
            "write other letters as xn--... or %..",
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as e:
        raise invalid(f"is not a valid URL: {e}") from e
    if parts.scheme != "https" and not (allow_private and parts.scheme == "http"):
        raise invalid(f"must start with https://, not {parts.scheme[:20]!r}")
    if "@" in parts.netloc:
        raise invalid("must not contain a user name or password", "store the key as a provider key")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise invalid("must not contain a query or a fragment")
    if port == 0:
        raise invalid("has port 0")
    if ".." in parts.path.split("/"):
        raise invalid("must not contain .. in its path")
    _check_host(host, allow_private, invalid)
    return url.rstrip("/")


def _check_host(host: str, allow_private: bool, invalid: Any) -> None:
    if ":" in host or _NUMERIC_LABEL.fullmatch(host.rstrip(".").rpartition(".")[2]):
        # Libraries disagree about the old notations (127.1, 0x7f000001), so they are rejected.
        try:
            ip = ip_address(host)
        except ValueError:
            raise invalid(f"has an IP address in an unsupported notation: {host!r}", "write four numbers") from None
        if not allow_private and not is_public(str(ip)):
            raise invalid(f"has an address that is not public: {host}", "the operator can allow private targets")
    elif not _HOST_NAME.fullmatch(host):
        raise invalid(f"has an invalid host name: {host[:100]!r}")
    elif not allow_private and host.rstrip(".").rpartition(".")[2].lower() in (
        "localhost",
        "local",
        "internal",
        "arpa",
    ):
        raise invalid(f"has a host name that is not public: {host}", "the operator can allow private targets")


class PublicResolver(AbstractResolver):
    def __init__(self, inner: AbstractResolver | None = None) -> None:
        self._inner = inner or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._inner.resolve(host, port, family)
        if not all(is_public(each["host"]) for each in addresses):
            raise OSError(None, f"{host} resolves to an address that is not public")
        return addresses

    async def close(self) -> None:
        await self._inner.close()


def open_public_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address as getaddrinfo returns it; raise OSError if it is not public."""
    family, kind, protocol, _, sockaddr = address
    if not is_public(sockaddr[0]):
        raise OSError(None, f"{sockaddr[0]} is not a public address")
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    return connection
