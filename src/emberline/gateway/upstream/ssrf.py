"""Protection against server-side request forgery: custom providers must be at public addresses.

`resolve_public_addresses` resolves a host name only if all its addresses are public. `open_public_socket` checks the
address again when the connection is made. The second check catches an address written as a number, which is not
resolved, and a name that resolves to a different address the second time.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

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
URL_HINT = "give an address such as https://api.example.com/v1"
PRIVATE_HINT = "the operator can allow private addresses with `private_providers = true` in gateway.toml"

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]  # as getaddrinfo returns it
ResolveHost = Callable[[str, int], Awaitable[list[AddressInfo]]]  # takes host and port


def is_public_address(address: str) -> bool:
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
    """Return the URL without a trailing slash.

    Raise InvalidRequest if the URL is not allowed for a provider. `allow_private`: the operator allows providers at
    private addresses and over plain HTTP.
    """
    if len(url) > _MAX_URL_CHARACTERS or not url.isascii() or any(c <= " " or c in '\\"<>^`{|}\x7f' for c in url):
        raise InvalidRequest(
            f"{param} must have at most {_MAX_URL_CHARACTERS} characters, all of which are allowed in a URL",
            param=param,
            hint="write a host name with other letters as xn--..., and other characters as %..",
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as e:
        raise InvalidRequest(f"{param} is not a valid URL: {e}", param=param, hint=URL_HINT) from e
    if parts.scheme != "https" and not (allow_private and parts.scheme == "http"):
        raise InvalidRequest(f"{param} must start with https://, not {parts.scheme[:20]!r}", param=param, hint=URL_HINT)
    if "@" in parts.netloc:
        raise InvalidRequest(
            f"{param} must not contain a user name or password", param=param, hint="store the key as a provider key"
        )
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise InvalidRequest(f"{param} must not contain a query or a fragment", param=param, hint=URL_HINT)
    if port == 0:
        raise InvalidRequest(f"{param} must not have port 0", param=param, hint=URL_HINT)
    if ".." in parts.path.split("/"):
        raise InvalidRequest(f"{param} must not contain .. in the path", param=param, hint=URL_HINT)
    _check_host(host, allow_private, param)
    return url.rstrip("/")


def _check_host(host: str, allow_private: bool, param: str) -> None:
    if ":" in host or _NUMERIC_LABEL.fullmatch(host.rstrip(".").rpartition(".")[2]):
        # Libraries disagree about the old notations (127.1, 0x7f000001), so they are rejected.
        try:
            ip = ip_address(host)
        except ValueError:
            raise InvalidRequest(
                f"{param} has an IP address in an unsupported notation: {host[:100]!r}",
                param=param,
                hint="write an IPv4 address as four decimal numbers",
            ) from None
        if not allow_private and not is_public_address(str(ip)):
            raise InvalidRequest(f"{param} has an address that is not public: {host}", param=param, hint=PRIVATE_HINT)
    elif not _HOST_NAME.fullmatch(host):
        raise InvalidRequest(f"{param} has an invalid host name: {host[:100]!r}", param=param, hint=URL_HINT)
    elif not allow_private and host.rstrip(".").rpartition(".")[2].lower() in (
        "localhost",
        "local",
        "internal",
        "arpa",
    ):
        raise InvalidRequest(f"{param} has a host name that is not public: {host}", param=param, hint=PRIVATE_HINT)


async def resolve_host(host: str, port: int) -> list[AddressInfo]:
    loop = asyncio.get_running_loop()
    return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG))


async def resolve_public_addresses(host: str, port: int, resolve: ResolveHost = resolve_host) -> list[AddressInfo]:
    """Return the addresses of a host. Raise OSError if one of them is not public."""
    addresses = await resolve(host, port)
    if not all(is_public_address(sockaddr[0]) for *_, sockaddr in addresses):
        raise OSError(None, f"host {host} resolves to an address that is not public")
    return addresses


def open_public_socket(address: AddressInfo) -> socket.socket:
    """Return an unconnected socket for the address.

    Raise OSError if the address is not public.
    """
    family, kind, protocol, _, sockaddr = address
    if not is_public_address(sockaddr[0]):
        raise OSError(None, f"address {sockaddr[0]} is not public")
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    return connection
