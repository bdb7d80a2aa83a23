"""Connections whose peers have not authenticated cannot keep others out."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import zlib
from collections.abc import Iterator

import pytest
from transfer_helpers import blank, small, soon

from emberline.core.engine_config import EngineConfig
from emberline.core.freeport import free_port
from emberline.core.log_throttle import LogThrottle
from emberline.core.pending_connections import PendingConnections
from emberline.engine.ranks.cluster_key import authenticate_master
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.node_listener import MAX_PENDING_NODES, NodeListener
from emberline.engine.ranks.node_messages import NodeHello, NodeJoined, NodeSocket
from emberline.kv.transfer.channel import HEADER, HEADER_CRC, MAGIC, MessageChannel, MessageKind
from emberline.kv.transfer.errors import PeerLost
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import MAX_HELLO_BYTES, MAX_PENDING_CONNECTIONS
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp


def test_newest_connection_replaces_the_oldest_of_the_busiest_address() -> None:
    closed: list[str] = []
    pending = PendingConnections(3)
    for name, address in (("a", "1"), ("b", "2"), ("c", "2"), ("d", "3")):
        pending.add(name, address, lambda name=name: closed.append(name))
    assert closed == ["b"] and not pending.remove("b") and pending.evictions == 1
    assert pending.remove("a") and len(pending) == 2


def test_throttled_log_counts_what_it_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    throttle = LogThrottle(logging.getLogger("test"), 10.0)
    for _ in range(3):
        throttle.write(logging.WARNING, "Refused: reason=%s", "x")
    now += 10.0
    throttle.write(logging.WARNING, "Refused: reason=%s", "y")
    assert [each.getMessage() for each in caplog.records] == [
        "Refused: reason=x",
        "Refused: reason=y similar_lines_omitted=2",
    ]


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(blank(small(), 12), "p")
    server = serve_tcp(made, io_timeout_s=20.0)
    yield made
    server.stop()


def port_of(sender: Sender) -> int:
    return int(sender.endpoints["tcp"].rpartition(":")[2])


def test_idle_connections_do_not_keep_kv_peers_out(sender: Sender) -> None:
    idle = [socket.create_connection(("127.0.0.1", port_of(sender))) for _ in range(4 * MAX_PENDING_CONNECTIONS)]
    receiver = Receiver(blank(small(), 12), [TcpTransport(small())])
    assert receiver.pull(sender.publish([1], 30.0), [0], soon()).complete
    receiver.close()
    idle[0].settimeout(10)
    assert idle[0].recv(1) == b"", "the oldest connection was closed"
    for each in idle:
        each.close()


def test_first_message_is_small(sender: Sender) -> None:
    """No memory is reserved for the announced length."""
    header = HEADER.pack(MAGIC, MessageKind.HELLO, 1, MAX_HELLO_BYTES + 1, 0)
    with socket.create_connection(("127.0.0.1", port_of(sender)), timeout=10) as connection:
        connection.sendall(header + HEADER_CRC.pack(zlib.crc32(header)))
        assert connection.recv(1) == b"", "closed before its body was awaited"
    assert sender.stats.failures["corrupted"] == 1


@pytest.mark.parametrize(
    "hello",
    [
        b'{"incarnation": "\\ud800"}',
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b"{}",
        b'{"incarnation": INCARNATION, "layout": 5}',
        b'{"incarnation": INCARNATION, "layout": {"tokens": 1}}',
        b'{"incarnation": INCARNATION, "layout": LAYOUT, "codecs": 5}',
        b'{"incarnation": INCARNATION, "layout": LAYOUT, "codecs": [[]]}',
    ],
)
def test_malformed_hello_gets_an_error_without_a_traceback(
    sender: Sender, hello: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    body = hello.replace(b"INCARNATION", json.dumps(sender.peer.incarnation).encode())
    body = body.replace(b"LAYOUT", json.dumps(small().as_dict()).encode())
    channel = MessageChannel(socket.create_connection(("127.0.0.1", port_of(sender))), 20.0)
    channel.send(MessageKind.HELLO, 1, body, soon())
    try:
        assert channel.receive(soon()).kind == MessageKind.ERROR
        with pytest.raises(PeerLost):
            channel.receive(soon())
    finally:
        channel.close()
    assert not [each for each in caplog.records if each.exc_info]


def test_malformed_request_gets_an_error_without_a_traceback(sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    channel = MessageChannel(socket.create_connection(("127.0.0.1", port_of(sender))), 20.0)
    hello = {"incarnation": sender.peer.incarnation, "layout": small().as_dict()}
    channel.send_json(MessageKind.HELLO, 1, hello, soon())
    assert channel.receive(soon()).kind == MessageKind.WELCOME
    for body in (b'{"id": "x", "known": Infinity, "wait": 0}', b'{"id": [], "known": 1, "wait": NaN}', b"[" * 99_999):
        channel.send(MessageKind.STATE, 2, body, soon())
        assert channel.receive(soon()).kind == MessageKind.ERROR
    channel.close()
    assert not [each for each in caplog.records if each.exc_info]


def test_idle_connections_do_not_keep_nodes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_CLUSTER_KEY", key := "a-cluster-key-of-the-tests-1234567890")
    monkeypatch.setattr(NodeListener, "_open_store", lambda self, listener: None)
    port = free_port()
    config = EngineConfig.build("", pp=2, nodes=2, master=f"127.0.0.1:{port}", threads=1)
    listener = NodeListener(config, Layout(pp=2, nodes=2))
    monkeypatch.setattr(listener, "_check_node", lambda hello: None)
    try:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * MAX_PENDING_NODES)]
        node = NodeSocket(socket.create_connection(("127.0.0.1", port)), 5.0)
        authenticate_master(node, (key,))
        node.send(NodeHello("v", 1, {}, 8, 1 << 30))
        assert isinstance(node.receive(NodeJoined), NodeJoined)
        for each in (*idle, node):
            each.close()
    finally:
        listener.close()
    assert not [each for each in threading.enumerate() if each.name == "nodes"]
