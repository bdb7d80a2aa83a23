"""Checks of workers' and routers' network addresses."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

LOCAL_NAMES = ("localhost", "localhost.localdomain")


def is_unspecified_address(host: str) -> bool:
    """Whether the host stands for all interfaces (0.0.0.0, ::, 0). A server can listen there; no client can connect."""
    for parse in (socket.inet_aton, _parse_ipv6):
        try:
            return not any(parse(host))
        except OSError:
            continue
    return not host


def find_outgoing_address(url: str) -> str:
    """Return the local IP address from which this machine connects to a URL. Raises OSError if there is no route."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: nothing is sent
        return str(probe.getsockname()[0])


def is_url_of_listener(url: str, host: str, port: int) -> bool:
    """Whether a URL leads to this process, which listens at `host` and `port`.

    Host names other than localhost are not resolved."""
    parts = urlsplit(url)
    target = "127.0.0.1" if parts.hostname in LOCAL_NAMES else parts.hostname or ""
    if (parts.port or (443 if parts.scheme == "https" else 80)) != port:
        return False
    own = "127.0.0.1" if host in LOCAL_NAMES else host
    return target == own or (is_unspecified_address(own) and _is_local_address(target))


def _is_local_address(host: str) -> bool:
    """Whether the address belongs to this machine. This is tested by binding a socket to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.inet_ntop(family, socket.inet_pton(family, host)), 0))
    except OSError:
        return False
    return True


def _parse_ipv6(host: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, host)
