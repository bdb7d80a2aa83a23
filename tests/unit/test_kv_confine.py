"""restrict_new_listeners: listeners of a library that binds every address answer only at the configured one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from tcp_listeners import listening_ports

from emberline.core.errors import InvalidRequest
from emberline.kv import confine
from emberline.kv.confine import ListenerExposed, resolve_ipv4_address, restrict_new_listeners
from emberline.kv.transfer.mooncake import MooncakeEngine


@pytest.fixture
def open_listener() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for it in sockets:
        it.close()


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 0.3).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_only_configured_address_answers(open_listener: list[socket.socket], family: int, host: str) -> None:
    other = socket.create_server(("", 0))
    with closing(other), restrict_new_listeners(host):
        both = family == socket.AF_INET6
        open_listener.append(socket.create_server(("", 0), family=family, dualstack_ipv6=both))
    port = open_listener[0].getsockname()[1]
    answering = {at for at in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "::1") if accepts(at, port)}
    assert answering == {host}


def test_earlier_listeners_are_unchanged(open_listener: list[socket.socket]) -> None:
    open_listener.append(socket.create_server(("", 0)))
    with restrict_new_listeners("127.0.0.1"):
        pass
    assert accepts("127.0.0.2", open_listener[0].getsockname()[1])


def test_earlier_connection_is_detected(open_listener: list[socket.socket]) -> None:
    with pytest.raises(ListenerExposed, match=r"127\.0\.0\.3"), restrict_new_listeners("127.0.0.1"):
        open_listener.append(socket.create_server(("", 0)))
        open_listener.append(socket.create_connection(("127.0.0.3", open_listener[0].getsockname()[1]), 5))


def test_ineffective_filter_is_detected(open_listener: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "_attach_socket_filter", lambda *_: None)
    with (
        pytest.raises(ListenerExposed, match=r"accepts connections at 127\.0\.0\.2"),
        restrict_new_listeners("127.0.0.1"),
    ):
        open_listener.append(socket.create_server(("", 0)))


def test_every_port_of_mooncake_is_confined() -> None:
    before = listening_ports()
    MooncakeEngine("127.0.0.1")
    ports = listening_ports() - before
    assert len(ports) == 2
    for port in ports:
        assert accepts("127.0.0.1", port) and not accepts("127.0.0.2", port) and not accepts("::1", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::1", "no such host", ""])
def test_invalid_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="kv_mooncake_host"):
        resolve_ipv4_address(host, "kv_mooncake_host")


def test_host_name_is_resolved() -> None:
    assert resolve_ipv4_address("localhost", "kv_mooncake_host") == "127.0.0.1"
