"""Addresses of workers, as routers reach them."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

LOCAL_NAMES = ("localhost", "localhost.localdomain")


def is_unspecified(host: str) -> bool:
    """Whether this is the address of all interfaces (0.0.0.0, ::, 0): one to listen on, which reaches nothing else."""
    for parse in (socket.inet_aton, _parse_ipv6):
        try:
            return not any(parse(host))
        except OSError:
            continue
    return not host


def outgoing_address(url: str) -> str:
    """This machine's address on the way to a URL. Raises OSError if there is no way."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, place = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # nothing is sent
        return str(probe.getsockname()[0])


def leads_to(url: str, host: str, port: int) -> bool:
    """Whether a URL is that of a listener of this process. Names other than localhost are not looked up."""
    parts = urlsplit(url)
    found = "127.0.0.1" if parts.hostname in LOCAL_NAMES else parts.hostname or ""
    if (parts.port or (443 if parts.scheme == "https" else 80)) != port:
        return False
    ours = "127.0.0.1" if host in LOCAL_NAMES else host
    return found == ours or (is_unspecified(ours) and _is_local(found))


def _is_local(host: str) -> bool:
    """Only an address of this machine can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.inet_ntop(family, socket.inet_pton(family, host)), 0))
    except OSError:
        return False
    return True


def _parse_ipv6(host: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, host)
