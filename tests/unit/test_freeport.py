"""Free ports are unused on all hosts and outside the range of outgoing connections."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from emberline.core import freeport
from emberline.core.freeport import PORT_RANGE, free_port


def test_port_is_free_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port("127.0.0.1", "127.0.0.2")
    monkeypatch.setattr(freeport, "PORT_RANGE", range(taken, taken + 1))
    with socket.socket() as bound:
        bound.bind(("127.0.0.2", taken))  # it does not listen yet
        assert free_port("127.0.0.1") == free_port() == taken
        with pytest.raises(OSError, match="no port is free"):
            free_port("127.0.0.1", "127.0.0.2")


def test_ports_are_not_repeated() -> None:
    assert len({free_port() for _ in range(20)}) == 20


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


def test_ports_are_below_ephemeral_range() -> None:
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if least < 32_768:
        pytest.skip("this machine gives connections nearly all ports")
    assert max(PORT_RANGE) < least
