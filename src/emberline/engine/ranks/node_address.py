"""Checks of the addresses of an engine's nodes. This module does not import torch."""

from __future__ import annotations

import errno
import ipaddress
import socket

from emberline.core.errors import InvalidRequest
from emberline.core.parallel_config import ParallelConfig

BACKLOG = 64  # connections that wait to be accepted


def bind_master(host: str, port: int) -> socket.socket:
    """Return a socket of node 0 that listens at this address. Raises InvalidRequest if that is not possible."""
    where = f"node 0 cannot listen at {host}, port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidRequest(f"{where}: {error}", param="master", hint="check the host name in --master") from error
    try:
        _check_specified(str(address[0]), "master", "HOST:PORT")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "set --master to an address of node 0 on all nodes"
        if error.errno == errno.EADDRINUSE:
            hint = "choose another port in --master on all nodes, or end the process that uses this one"
        raise InvalidRequest(f"{where}: {error.strerror}", param="master", hint=hint) from error
    except InvalidRequest:
        listener.close()
        raise
    return listener


def check_node_address(parallel: ParallelConfig) -> None:
    """Raise InvalidRequest if node_address is set, but is no address of this node."""
    if (address := parallel.node_address) is None:
        return
    _check_specified(address, "node_address", "ADDRESS")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        message = f"node_address is {address}, which is no address of this node: {error.strerror or error}"
        raise InvalidRequest(
            message, param="node_address", hint="set --node-address to one of its addresses"
        ) from error


def _check_specified(address: str, param: str, form: str) -> None:
    try:
        is_unspecified = ipaddress.ip_address(address).is_unspecified
    except ValueError:  # a host name
        is_unspecified = False
    if is_unspecified:
        message = f"{param} has the address {address}, which stands for all interfaces, and other nodes connect to it"
        hint = f"set --{param.replace('_', '-')} {form} to the address at which other nodes reach this one"
        raise InvalidRequest(message, param=param, hint=hint)
