"""TransferEndpoint: it serves every transport that works on this machine, and only those."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from transfer_helpers import content, fill, small, soon

from emberline.core.freeport import free_port
from emberline.core.transfer_config import TransferConfig
from emberline.kernels.cpu.library import find_library
from emberline.kv.checksum import select_crc
from emberline.kv.codec import select_kv_codec
from emberline.kv.transfer import endpoint
from emberline.kv.transfer.endpoint import SameHostAccess, TransferEndpoint, TransferOptions
from emberline.kv.transfer.errors import TransferCorrupted
from emberline.kv.transfer.mooncake_server import MooncakeServer
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.shm import SharedSegment

LIBRARY = find_library()


def open_endpoint(
    name: str, *, mooncake: bool, host: str = "127.0.0.1", port: int = 0, at: str = "127.0.0.1"
) -> TransferEndpoint:
    ways = TransferOptions(
        select_crc(LIBRARY), select_kv_codec("auto", LIBRARY, "bfloat16"), True, at if mooncake else None, mooncake
    )
    segment = SharedSegment(small(), 12)
    return TransferEndpoint.open(
        TransferConfig(name, host, port), segment.region, SameHostAccess.via_shared_memory(segment), ways
    )


@pytest.mark.parametrize("kind", ["shm", "mooncake", "tcp"])
def test_blocks_arrive_by_every_transport(kind: str) -> None:
    here, there = open_endpoint("here", mooncake=True), open_endpoint("there", mooncake=True)
    assert set(there.sender.endpoints) == {"shm", "tcp", "mooncake"}
    for other in {"shm", "tcp", "mooncake"} - {kind}:
        del there.sender.endpoints[other]
    sent = fill(there.sender.region, [4, 5, 1], 1)
    here.receiver.pull(there.sender.publish([4, 5, 1], 30.0), [2, 3, 9], soon())
    assert content(here.receiver.region, [2, 3, 9]) == sent
    here.close()
    there.close()


def test_broken_mooncake_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(endpoint, "_mooncake_engines", {})
    monkeypatch.setattr(endpoint, "check_mooncake_usable", lambda *_: "it died of signal 11")
    with caplog.at_level(logging.WARNING):
        made = open_endpoint("here", mooncake=True)
    assert set(made.sender.endpoints) == {"shm", "tcp"} and "signal 11" in caplog.text
    made.close()


def test_failed_open_stops_all_servers() -> None:
    before = threading.active_count()
    with pytest.raises(OSError):
        open_endpoint("x", mooncake=False, host="192.0.2.1")
    gc.collect()
    assert "emberline-kv" not in Path("/proc/self/maps").read_text() and threading.active_count() == before


CONFIGURED_PORTS_SCRIPT = """
import sys
from tcp_listeners import listening_ports
from test_transfer_endpoint import open_endpoint
base = int(sys.argv[1])
made = open_endpoint("here", mooncake=True, port=base)
endpoints = made.sender.endpoints
assert (endpoints["tcp"], endpoints["mooncake"]) == (f"127.0.0.1:{base}", f"127.0.0.1:{base + 1}"), endpoints
assert listening_ports() == {base, base + 1, base + 2, base + 3}, listening_ports()
other = open_endpoint("another model", mooncake=True, port=base + 8)
assert listening_ports() - {base, base + 1, base + 2, base + 3} == {base + 8, base + 9}
other.close(); made.close()
"""


def test_transports_use_configured_ports() -> None:
    """Runs in another process, because Mooncake reads its settings once."""
    command = [sys.executable, "-c", CONFIGURED_PORTS_SCRIPT, str(free_port())]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=path)
    assert done.returncode == 0, done.stderr


def test_network_address_logs_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(endpoint, "is_loopback", lambda host: host != "127.0.0.9")
    with caplog.at_level(logging.WARNING):
        open_endpoint("here", mooncake=True, at="127.0.0.9").close()
    assert "authenticates no peer" in caplog.text and "host=127.0.0.9" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_endpoint("here", mooncake=True).close()
    assert "authenticates" not in caplog.text


STRANGER = """
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
junk = engine.allocate_managed_buffer(4096)
engine.write_bytes_to_buffer(junk, bytes(4096), 4096)
sys.exit(engine.transfer_sync_write(sys.argv[1], junk, int(sys.argv[2]), int(sys.argv[3])))
"""


def test_foreign_write_is_detected() -> None:
    """Mooncake lets any process that reaches its port write to a published block."""
    here, there = open_endpoint("here", mooncake=True), open_endpoint("there", mooncake=True)
    for other in ("shm", "tcp"):
        del there.sender.endpoints[other]
    region = there.sender.region
    assert isinstance(region, HostRegion)
    first, sent = fill(region, [4], 1), fill(region, [5, 1], 2)
    kept, ticket = there.sender.publish([5, 1], 30.0), there.sender.publish([4], 30.0)
    engine = next(server._engine for server in there.servers if isinstance(server, MooncakeServer))
    address = np.frombuffer(region.parts[0], np.uint8).ctypes.data + 4 * region.layout.plane_bytes
    stranger = [sys.executable, "-c", STRANGER, engine.session, str(address), str(region.layout.plane_bytes)]
    assert subprocess.run(stranger, capture_output=True, timeout=60).returncode == 0
    assert content(region, [4]) != first, "the other process wrote"
    with pytest.raises(TransferCorrupted, match="a different checksum than the published one"):
        here.receiver.pull(ticket, [2], soon())
    here.receiver.pull(kept, [2, 3], soon())
    assert content(here.receiver.region, [2, 3]) == sent
    here.close()
    there.close()
