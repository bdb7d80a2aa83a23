"""Makes TCP listeners that a library opened at every address (0.0.0.0) reachable at one address only.

Mooncake's engine opens two TCP listeners and has no setting for their address. A socket filter drops every packet that
was not sent to the configured address. The effect is the same as binding to that address. Connections that the listener
accepts inherit the filter. Linux lets any process attach such a filter to its own sockets.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from emberline.core.errors import EmberlineError, InvalidRequest

LOOPBACK = "127.0.0.1"
SO_ATTACH_FILTER = 26
NETWORK_HEADER_OFFSET = 0xFFF00000  # SKF_NET_OFF: offsets from here on count from the IP header
LOAD_BYTE, LOAD_WORD, SHIFT_RIGHT, JUMP_IF_EQUAL, RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
CONNECT_TIMEOUT_S = 0.2
LISTEN, TIME_WAIT = "0A", "06"  # states in /proc/net/tcp


class ListenerExposed(EmberlineError):
    """A listener could not be restricted to one address."""

    status = 503
    code = "listener_exposed"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve_ipv4_address(host: str, setting_name: str) -> str:
    """Return the IPv4 address of `host`, the value of a setting.

    Raises InvalidRequest if the host has no IPv4 address or stands for every address (0.0.0.0).
    """
    try:
        address = ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, ValueError) as error:
        reason, hint = f"has no IPv4 address: {error}", "set it to an IPv4 address of this host"
        raise InvalidRequest(f"{setting_name} is {host!r}, which {reason}", param=setting_name, hint=hint) from error
    if address.is_unspecified:
        hint = "set it to the one address that other workers connect to"
        raise InvalidRequest(
            f"{setting_name} is {host!r}, which stands for every address of this host", param=setting_name, hint=hint
        )
    return str(address)


@contextmanager
def restrict_new_listeners(allowed_host: str) -> Iterator[None]:
    """Restrict listeners opened within this context to connections to the address `allowed_host`.

    Raises ListenerExposed if a listener still accepts connections at a different address, or accepted one before the
    filter was attached.
    """
    before = _find_own_listeners()
    yield
    opened = _find_own_listeners()
    ports = {port for inode, (_, port) in opened.items() if inode not in before}
    try:
        for inode, (fd, _) in opened.items():
            if inode not in before:
                _attach_socket_filter(fd, allowed_host)
    except OSError as error:
        raise ListenerExposed(f"cannot restrict Mooncake's listeners to {allowed_host}: {error}") from error
    if early := [address for address in _connection_addresses(ports) if address != allowed_host]:
        raise ListenerExposed(
            f"Mooncake's listeners accepted connections to {', '.join(early)} before they were restricted"
            f" to {allowed_host}"
        )
    other = next(address for address in ("127.0.0.2", "127.0.0.3") if address != allowed_host)
    for port in ports:
        if _accepts_connection(other, port):
            raise ListenerExposed(
                f"Mooncake's port {port} accepts connections at {other}, although it was restricted to {allowed_host}"
            )


def _find_own_listeners() -> dict[str, tuple[int, int]]:
    """Return the file descriptor and the port of each TCP listener of this process, by the inode of its socket."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor was closed meanwhile, or is not a socket
            inode = str(entry.readlink())
            if inode.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    if sock.family != socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[inode] = int(entry.name), sock.getsockname()[1]
    return found


def _attach_socket_filter(fd: int, host: str) -> None:
    """Attach a filter to the socket that drops every packet that is not IPv4 or not addressed to `host`."""
    address = int(ipaddress.IPv4Address(host))
    program = (
        (LOAD_BYTE, 0, 0, NETWORK_HEADER_OFFSET),
        (SHIFT_RIGHT, 0, 0, 4),
        (JUMP_IF_EQUAL, 0, 3, 4),  # IPv4
        (LOAD_WORD, 0, 0, NETWORK_HEADER_OFFSET + 16),  # the destination
        (JUMP_IF_EQUAL, 0, 1, address),
        (RETURN, 0, 0, 0xFFFFFFFF),  # accept the packet
        (RETURN, 0, 0, 0),  # drop the packet
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))


def _connection_addresses(ports: Iterable[int]) -> list[str]:
    """Return the local address of each connection to these ports.

    An IPv6 address is returned as hexadecimal digits, unless it is a mapped IPv4 address.
    """
    wanted_ports, found = {f"{port:04X}" for port in ports}, []
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, _, port = local.partition(":")
                if port in wanted_ports and state not in (LISTEN, TIME_WAIT):
                    found.append(_format_address(address))
    return found


def _format_address(address: str) -> str:
    mapped = address.removeprefix("0000000000000000FFFF0000")
    return socket.inet_ntoa(struct.pack("=I", int(mapped, 16))) if len(mapped) == 8 else address


def _accepts_connection(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
