"""Free ports: nobody listens there, and no connection is given one meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from emberline.core import freeport
from emberline.core.freeport import PORTS, free_port


def test_nobody_listens_at_any_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port("127.0.0.1", "127.0.0.2")
    with socket.create_server(("127.0.0.2", taken)):
        monkeypatch.setattr(freeport, "PORTS", [taken])
        assert free_port("127.0.0.1") == free_port() == taken
        with pytest.raises(OSError, match="no port is free"):
            free_port("127.0.0.1", "127.0.0.2")


def test_connections_are_given_others() -> None:
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(PORTS) < least
