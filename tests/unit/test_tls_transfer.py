"""KV transfer over TLS: blocks arrive, and only peers with the right certificate connect."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from transfer_helpers import blank, content, fill, small, soon

from emberline.bench.certificates import LocalCA
from emberline.core.tls import TLSIdentity
from emberline.core.tls_config import TLSConfig
from emberline.core.transfer_config import TransferConfig
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.kv.transfer.errors import PeerLost, PeerUnreachable
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tcp import TcpTransport, make_tcp_connector, serve_tcp
from emberline.kv.transfer.tls_channel import make_channel

IO_TIMEOUT_S = 1.0
LEASE = 20.0


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> LocalCA:
    return LocalCA(tmp_path_factory.mktemp("ca"))


def config_of(ca: LocalCA, name: str, names: tuple[str, ...] = (), trusted: LocalCA | None = None) -> TLSConfig:
    files = ca.issue(name, ("127.0.0.1", name))
    return TLSConfig(str(files.cert), str(files.key), str((trusted or ca).file), names)


@contextmanager
def serving(config: TLSConfig | None, blocks: int = 12, width: int = 2) -> Iterator[Sender]:
    sender = Sender(blank(small(width=width), blocks), "p")
    tls = TLSIdentity(config).peer_listener_context() if config is not None else None
    server = serve_tcp(sender, io_timeout_s=IO_TIMEOUT_S, tls=tls)
    try:
        yield sender
    finally:
        server.stop()
        assert server.num_connections == 0


def receiver_of(config: TLSConfig | None, *, connections: int = 1, width: int = 2, blocks: int = 12) -> Receiver:
    tls = TLSIdentity(config).peer_client_context() if config is not None else None
    layout = small(width=width)
    options = LinkOptions(io_timeout_s=IO_TIMEOUT_S, connections=connections)
    return Receiver(blank(layout, blocks), [TcpTransport(layout, options, tls)], max_piece_bytes=1 << 20)


@pytest.mark.parametrize(("connections", "width"), [(1, 2), (3, 1 << 13)])
def test_blocks_arrive_over_tls(ca: LocalCA, connections: int, width: int) -> None:
    with serving(config_of(ca, "sender"), width=width) as sender:
        assert [*sender.endpoints] == ["tls"]
        receiver = receiver_of(config_of(ca, "receiver"), connections=connections, width=width)
        sent = fill(sender.region, [4, 5, 1], 1)
        ticket = sender.publish([4, 5], LEASE, complete=False)
        progress = PullProgress()
        pull = threading.Thread(target=receiver.pull, args=(ticket, [0, 3, 2], soon()), kwargs={"progress": progress})
        pull.start()
        time.sleep(0.05)
        sender.extend_ticket(ticket, [1], complete=True)
        pull.join(20)
        assert progress.complete and content(receiver.region, [0, 3, 2]) == sent
        time.sleep(IO_TIMEOUT_S / 5)
        receiver.renew(ticket, soon())  # over a connection that was idle
        receiver.acknowledge(ticket, soon())
        receiver.close()


def test_stopped_channel_wakes_its_reader(ca: LocalCA) -> None:
    with serving(config_of(ca, "sender")) as sender:
        tls = TLSIdentity(config_of(ca, "receiver")).peer_client_context()
        channel = make_channel(make_tcp_connector(sender.endpoints["tls"], tls)(5.0), 20.0)
        threading.Timer(0.1, channel.stop).start()
        began = time.monotonic()
        with pytest.raises(PeerLost):
            channel.receive(soon())
        assert time.monotonic() - began < IO_TIMEOUT_S / 2 and not channel.is_idle()
        channel.close()


def test_peers_with_wrong_certificates_are_refused(ca: LocalCA, tmp_path: Path) -> None:
    other = LocalCA(tmp_path)
    good = config_of(ca, "sender")
    with serving(replace(good, peer_names=("receiver", "sender"))) as sender:
        peer = sender.peer
        for wrong, reason in (
            (config_of(other, "receiver"), "CERTIFICATE_VERIFY_FAILED"),  # it does not know the sender's CA
            (config_of(ca, "receiver", ("another",)), "none of them is allowed"),  # it expects another name
            (None, "no transport in common"),
        ):
            with pytest.raises(PeerUnreachable, match=reason):
                receiver_of(wrong).connect(peer, soon())
        for refused in (
            config_of(other, "receiver", trusted=ca),  # the sender does not know its CA
            replace(good, cert=None, key=None),
            config_of(ca, "stranger"),  # the sender does not know its name
        ):
            with pytest.raises((PeerUnreachable, PeerLost)):
                receiver_of(refused).connect(peer, soon())
        receiver = receiver_of(config_of(ca, "receiver", ("sender",)))
        receiver.connect(peer, soon())
        receiver.close()


def test_plain_and_silent_connections_end_in_time(ca: LocalCA) -> None:
    with serving(config_of(ca, "sender")) as sender:
        host, _, port = sender.endpoints["tls"].rpartition(":")
        for first in (b"EKV1 not TLS at all" * 10, b""):
            with socket.create_connection((host, int(port)), timeout=10 * IO_TIMEOUT_S) as connection:
                connection.sendall(first)
                with suppress(ConnectionResetError):
                    assert len(connection.recv(1000)) < 10 and not connection.recv(1000)  # an alert at most
    with serving(None) as sender:
        plain = replace(sender.peer, endpoints={"tls": sender.endpoints["tcp"]})
        with pytest.raises(PeerUnreachable):
            receiver_of(config_of(ca, "receiver")).connect(plain, soon())


def test_peers_that_disconnect_at_once_delay_no_other(ca: LocalCA, caplog: pytest.LogCaptureFixture) -> None:
    with serving(config_of(ca, "sender")) as sender:
        host, _, port = sender.endpoints["tls"].rpartition(":")
        for _ in range(40):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"hello")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset when closed
        receiver, began = receiver_of(config_of(ca, "receiver")), time.monotonic()
        try:
            receiver.connect(sender.peer, soon())
            assert time.monotonic() - began < 2.0 and "Cannot accept" not in caplog.text
        finally:
            receiver.close()


def test_endpoint_with_tls_offers_no_plain_tcp(ca: LocalCA) -> None:
    endpoint = TransferEndpoint.open(TransferConfig("p", tls=config_of(ca, "p")), blank(small(), 4))
    try:
        assert [*endpoint.sender.endpoints] == ["tls"]
    finally:
        endpoint.close()
