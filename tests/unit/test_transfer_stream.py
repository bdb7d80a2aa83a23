"""TCP, shared memory and Mooncake transports over real sockets and processes, with injected faults."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from staged_mooncake import StagedTransport, serve_staged
from transfer_helpers import Fault, Proxy, blank, content, fill, small, soon, with_endpoint

from emberline.core.clock import ManualClock
from emberline.kv.transfer.base import Transport
from emberline.kv.transfer.channel import HEADER, HEADER_CRC, MessageChannel, MessageKind
from emberline.kv.transfer.errors import (
    BadTransfer,
    BlockReused,
    IncompatibleCaches,
    PeerChanged,
    PeerLost,
    PeerUnreachable,
    TicketEnded,
    TransferCancelled,
    TransferCorrupted,
    TransferError,
    TransferTimeout,
)
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.mooncake import MooncakeEngine, MooncakeTransport
from emberline.kv.transfer.mooncake_server import serve_mooncake
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import TransferServer
from emberline.kv.transfer.shm import SharedSegment, ShmTransport, serve_shm
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp
from emberline.kv.transfer.ticket import Ticket

LEASE, IO_TIMEOUT_S = 30.0, 20.0
KINDS = ["tcp", "shm", "mooncake", "staged"]  # staged: Mooncake, for a cache that it cannot read directly
SLACK = 16  # bytes by which runs differ in length: messages contain seconds as decimals


@functools.cache
def mooncake() -> MooncakeEngine:
    return MooncakeEngine()


@dataclass
class Host:
    """A sender with servers of all transports."""

    sender: Sender
    servers: list[TransferServer]

    def receiver(self, kind: str, layout: KVLayout | None = None, **options: object) -> Receiver:
        layout = layout or small()
        link_options = replace(LinkOptions(io_timeout_s=IO_TIMEOUT_S, connections=1), **options)
        transport: Transport = (
            TcpTransport(layout, link_options) if kind == "tcp" else ShmTransport(layout, link_options)
        )
        if kind in ("mooncake", "staged"):
            transport = (StagedTransport if kind == "staged" else MooncakeTransport)(layout, mooncake(), link_options)
        return Receiver(blank(layout, 12), [transport], max_piece_bytes=64)

    def check_settled(self) -> None:
        """Assert that no connection and no thread is left."""
        until = soon()
        while any(server.num_connections for server in self.servers):
            assert time.monotonic() < until, "a connection stays open"
            time.sleep(0.005)


class FakeCodec:
    name = "zlib"

    def __init__(self) -> None:
        self.used = 0

    def max_encoded_bytes(self, size: int) -> int:
        return 2 * size + 64

    def encode(self, data: memoryview, out: memoryview) -> int:
        self.used += 1
        made = zlib.compress(data)
        out[: len(made)] = made
        return len(made)

    def decode(self, data: memoryview, out: memoryview) -> bool:
        try:
            out[:] = zlib.decompress(data)
        except zlib.error:
            return False
        return True


@pytest.fixture
def host() -> Iterator[Host]:
    before = set(threading.enumerate())
    segment = SharedSegment(small(), 12)
    sender = Sender(segment.region, "p")
    servers: list[TransferServer] = [serve_tcp(sender, io_timeout_s=IO_TIMEOUT_S)]
    servers.append(serve_shm(sender, segment, io_timeout_s=IO_TIMEOUT_S))
    servers += [serve(sender, mooncake(), io_timeout_s=IO_TIMEOUT_S) for serve in (serve_mooncake, serve_staged)]
    made = Host(sender, servers)
    yield made
    for server in made.servers:
        server.stop()
    assert all(server.num_connections == 0 for server in made.servers)
    ours = [one for one in threading.enumerate() if one.name.startswith("kv-") and one not in before]
    for thread in ours:
        thread.join(10)  # a thread whose connection just ended may still be running
    assert not any(thread.is_alive() for thread in ours), "a thread is still running"


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_arrive(host: Host, kind: str, streams: int) -> None:
    receiver = host.receiver(kind, connections=streams)
    receiver.connect(host.sender.peer, soon())
    sent = fill(host.sender.region, [4, 5, 1, 7], 1)
    ticket = Ticket.parse(host.sender.publish([4, 5, 1, 7], LEASE).as_dict())
    receiver.pull(ticket, [0, 3, 2, 9], soon())
    assert content(receiver.region, [0, 3, 2, 9]) == sent
    receiver.renew(ticket, soon())
    receiver.acknowledge(ticket, soon())
    assert [e.reason for e in host.sender.collect_ended_leases()] == [LeaseEndReason.ACKNOWLEDGED]
    with pytest.raises(TicketEnded, match="acknowledged"):
        receiver.pull(ticket, [0, 3, 2, 9], soon())
    receiver.close()
    host.check_settled()


@pytest.mark.parametrize("kind", KINDS)
def test_pull_follows_growing_ticket(host: Host, kind: str) -> None:
    receiver = host.receiver(kind, small(8))
    sent = fill(host.sender.region, [0], 1)
    ticket = host.sender.publish([0], LEASE, complete=False)
    progress = PullProgress()
    thread = threading.Thread(target=receiver.pull, args=(ticket, [5, 3], soon()), kwargs={"progress": progress})
    thread.start()
    for block in (1, 2, 3):
        sent += fill(host.sender.region, [block], block)
        host.sender.extend_ticket(ticket, [block], complete=block == 3)
        time.sleep(0.01)
    thread.join(20)
    assert progress.complete and content(receiver.region, [5, 3]) == sent
    receiver.close()


@pytest.mark.parametrize("tokens", [2, 8])
def test_block_sizes_may_differ(host: Host, tokens: int) -> None:
    for kind in KINDS:
        receiver = host.receiver(kind, small(tokens))
        sent = fill(host.sender.region, [4, 1], 1)
        into = [6, 2, 3, 9][: 8 // tokens]
        receiver.pull(host.sender.publish([4, 1], LEASE), into, soon())
        assert content(receiver.region, into) == sent
        receiver.close()


def test_common_codec_is_used() -> None:
    ours, theirs = FakeCodec(), FakeCodec()
    sender = Sender(blank(small(), 12), "p")
    server = serve_tcp(sender, codecs=[theirs])
    sent = fill(sender.region, [1, 2], 1)
    for codecs, always, used in (([], True, False), ([ours], False, False), ([ours], True, True)):
        transport = TcpTransport(small(), LinkOptions(codecs=codecs, always_encode=always))
        receiver = Receiver(blank(small(), 12), [transport], max_piece_bytes=64)
        receiver.pull(sender.publish([1, 2], LEASE), [3, 4], soon())
        assert content(receiver.region, [3, 4]) == sent and bool(theirs.used) is used
        receiver.close()
    server.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_generation_misuse_is_noticed(host: Host, kind: str) -> None:
    receiver = host.receiver(kind)
    ticket = host.sender.publish([1, 2], LEASE)
    fill(host.sender.region, [2], 1)
    with pytest.raises(BlockReused):
        receiver.pull(ticket, [1, 2], soon())
    fresh = host.sender.publish([1, 2], LEASE)  # the connection stays usable
    receiver.pull(fresh, [1, 2], soon())
    if kind != "shm":
        forged = replace(fresh, generations=tuple(g + 1 for g in fresh.generations))
        with pytest.raises(TransferCorrupted, match="overwritten"):
            receiver.pull(forged, [1, 2], soon())
    receiver.close()


def test_connection_is_refused_with_a_reason(host: Host) -> None:
    peer = host.sender.peer
    for kind in KINDS:
        with pytest.raises(PeerChanged):
            host.receiver(kind).connect(replace(peer, incarnation="earlier"), soon())
        lying = host.receiver(kind, small(heads=4))
        with pytest.raises(
            IncompatibleCaches, match="heads"
        ):  # the sender checks too, whatever its description contains
            lying.connect(replace(peer, layout=small(heads=4)), soon())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "nonsense", "127.0.0.1:x"):
        with pytest.raises(PeerUnreachable):
            host.receiver("tcp").connect(replace(peer, endpoints={"tcp": address}), soon())
    with pytest.raises(PeerUnreachable):
        host.receiver("shm").connect(replace(peer, endpoints={"shm": "nobody"}), soon())
    host.check_settled()


def test_next_transport_is_used_if_first_fails(host: Host) -> None:
    habits = LinkOptions(io_timeout_s=IO_TIMEOUT_S)
    receiver = Receiver(blank(small(), 12), [ShmTransport(small()), TcpTransport(small(), habits)])
    ticket = host.sender.publish([1], LEASE)
    elsewhere = replace(ticket.peer, endpoints={**ticket.peer.endpoints, "shm": "of another host"})
    assert receiver.pull(replace(ticket, peer=elsewhere), [0], soon()).complete
    receiver.close()


def test_restarted_sender_at_same_address_is_detected(host: Host) -> None:
    receiver = host.receiver("tcp")
    ticket = host.sender.publish([1], LEASE)
    receiver.connect(ticket.peer, soon())
    port = int(host.sender.endpoints["tcp"].rpartition(":")[2])
    host.servers[0].stop()
    second = Sender(host.sender.region, "p")
    host.servers[0] = serve_tcp(second, port=port, io_timeout_s=IO_TIMEOUT_S)
    with pytest.raises(PeerChanged):
        receiver.pull(ticket, [0], soon())
    receiver.close()


def test_damaged_message_is_noticed() -> None:
    here, there = socket.socketpair()
    with here, there:
        sender, receiver = MessageChannel(here), MessageChannel(there)
        sender.send(MessageKind.PIECE_END, 7, b"body", soon())
        raw = there.recv(1000)
        for at in range(len(raw)):
            here.sendall(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            with pytest.raises(TransferCorrupted):
                receiver.receive(soon())
            there.recv(1000, socket.MSG_DONTWAIT) if at < HEADER.size + HEADER_CRC.size else None  # the unread body
        here.sendall(raw)
        assert receiver.receive(soon()) == (MessageKind.PIECE_END, 7, b"body")


def test_reply_to_another_request_is_refused(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            channel = MessageChannel(listener.accept()[0])
            hello = channel.receive(soon())
            message_body = {"layout": hello.read_json()["layout"], "codec": None}
            channel.send_json(MessageKind.WELCOME, hello.transfer ^ 1, message_body, soon())
            with contextlib.suppress(PeerLost):
                channel.wait_for_message(20)
            channel.close()

        thread = threading.Thread(target=answer)
        thread.start()
        peer = replace(host.sender.peer, endpoints={"tcp": f"127.0.0.1:{listener.getsockname()[1]}"})
        with pytest.raises(TransferCorrupted, match="a different request"):
            host.receiver("tcp").connect(peer, soon())
        thread.join(20)


def clean_run(host: Host) -> Proxy:
    with Proxy(host.sender.endpoints["tcp"]) as proxy:
        receiver = host.receiver("tcp")
        receiver.pull(with_endpoint(host.sender.publish([1, 2], LEASE), proxy.address), [5, 3], soon())
        receiver.close()
    return proxy


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_connection_broken_at_any_byte(host: Host, kind: str, down: bool) -> None:
    """Break it at message boundaries, as the proxy saw them, and at every eleventh byte."""
    whole = clean_run(host)
    sent = fill(host.sender.region, [1, 2], 1)
    failed = 0
    for at in sorted(whole.borders[down] | set(range(0, whole.counts[down] - SLACK, 11))):
        with Proxy(host.sender.endpoints["tcp"], Fault(kind, down, at)) as proxy:
            receiver, progress = host.receiver("tcp"), PullProgress()
            ticket = with_endpoint(host.sender.publish([1, 2], LEASE), proxy.address)
            try:
                receiver.pull(ticket, [5, 3], soon(), progress=progress)
            except TransferError:
                failed += 1
                assert not progress.complete
                receiver.pull(ticket, [5, 3], soon(), progress=progress)
            assert proxy.happened
            assert content(receiver.region, [5, 3]) == sent, f"wrong bytes after a {kind} at {at}"
            receiver.acknowledge(ticket, soon())
            receiver.close()
        assert [e.id for e in host.sender.collect_ended_leases()] == [ticket.id]
    assert failed > 20
    host.check_settled()


@pytest.mark.parametrize("down", [True, False])
def test_silent_peer_is_lost(host: Host, down: bool) -> None:
    whole = clean_run(host)
    for at in (0, whole.counts[down] // 2, whole.counts[down] - SLACK):
        with Proxy(host.sender.endpoints["tcp"], Fault("hold", down, at)) as proxy:
            receiver, progress = host.receiver("tcp", io_timeout_s=0.3), PullProgress()
            ticket = with_endpoint(host.sender.publish([1, 2], LEASE), proxy.address)
            try:
                receiver.pull(ticket, [5, 3], soon(), progress=progress)
            except PeerLost as error:
                assert "no byte" in error.message or "closed the connection" in error.message
            assert proxy.happened
            receiver.close()
    host.check_settled()


def test_deadline_applies_to_silent_peer(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, no process answers
        peer = replace(host.sender.peer, endpoints={"tcp": f"127.0.0.1:{mute.getsockname()[1]}"})
        with pytest.raises(TransferTimeout):
            host.receiver("tcp", io_timeout_s=30.0).connect(peer, soon(0.2))
        with pytest.raises(PeerLost, match="no byte"):
            host.receiver("tcp", io_timeout_s=0.2).connect(peer, soon(30))


def test_deadline_applies_to_ticket_that_does_not_grow(host: Host) -> None:
    for kind in KINDS:
        receiver, progress = host.receiver(kind), PullProgress()
        ticket = host.sender.publish([1], LEASE, complete=False)
        with pytest.raises(TransferTimeout):
            receiver.pull(ticket, [0], soon(0.2), progress=progress)
        assert progress.arrived_bytes == small().block_bytes and not progress.complete
        receiver.close()


def test_waiting_pull_is_cancelled(host: Host) -> None:
    whole = clean_run(host)
    with Proxy(host.sender.endpoints["tcp"], Fault("hold", True, whole.counts[True] // 2)) as proxy:
        receiver, progress = host.receiver("tcp", io_timeout_s=30.0), PullProgress()
        ticket = with_endpoint(host.sender.publish([1, 2], LEASE), proxy.address)
        ended: list[TransferError] = []

        def pull() -> None:
            try:
                receiver.pull(ticket, [5, 3], soon(3600), progress=progress)
            except TransferError as error:
                ended.append(error)

        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        while not proxy.happened:
            time.sleep(0.005)
        progress.cancel()
        thread.join(20)  # the proxy holds the connection for longer
        assert [type(error) for error in ended] == [TransferCancelled]
        with pytest.raises(TransferCancelled):
            receiver.pull(ticket, [5, 3], soon(), progress=progress)
        receiver.release(ticket, soon())
        receiver.close()
    assert [e.reason for e in host.sender.collect_ended_leases()] == [LeaseEndReason.RELEASED]


def test_receiver_that_stops_reading_does_not_block_sender(host: Host) -> None:
    """Its connection ends after the sender's I/O timeout, its lease expires, and its blocks are collected once."""
    clock = ManualClock()
    big = small(tokens=1 << 14, layers=32)
    sender = Sender(blank(big, 4), "p", clock=clock)
    server = serve_tcp(sender, io_timeout_s=0.3)
    ticket = sender.publish([0, 1, 2, 3], LEASE)
    sock = socket.create_connection(("127.0.0.1", int(sender.endpoints["tcp"].rpartition(":")[2])))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    channel = MessageChannel(sock)
    message_body = {"incarnation": sender.peer.incarnation, "layout": ticket.as_dict()["peer"]["layout"]}
    channel.send_json(MessageKind.HELLO, 1, message_body, soon())
    assert channel.receive(soon()).kind == MessageKind.WELCOME
    asked = {"id": ticket.id, "pieces": [[0, 32, 0, 4]], "seconds": 60, "checked": True, "coded": False}
    channel.send_json(MessageKind.PULL, 2, asked, soon())
    Host(sender, [server]).check_settled()
    clock.advance(LEASE)
    assert [e.reason for e in sender.collect_ended_leases()] == [
        LeaseEndReason.EXPIRED
    ] and sender.collect_ended_leases() == []
    channel.close()
    server.stop()


@pytest.mark.parametrize(
    "asked",
    [
        {"id": 5, "pieces": [[0, 1, 0, 1]], "seconds": 1, "checked": True, "coded": False},
        {"id": "T", "pieces": [[0, 9, 0, 1]], "seconds": 1, "checked": True, "coded": False},
        {"id": "T", "pieces": [[0, 1, 0, 3]], "seconds": 1, "checked": True, "coded": False},
        {"id": "T", "pieces": [[0, 1, -1, 1]], "seconds": 1, "checked": True, "coded": False},
        {"id": "T", "pieces": [["x"]], "seconds": 1, "checked": True, "coded": False},
        {"id": "T", "seconds": 1},
        {"id": [], "pieces": [[0, 1, 0, 1]], "seconds": 1, "checked": True, "coded": False},
    ],
)
def test_malformed_request_gets_an_error(host: Host, asked: dict[str, object]) -> None:
    ticket = host.sender.publish([1, 2], LEASE)
    sock = socket.create_connection(("127.0.0.1", int(host.sender.endpoints["tcp"].rpartition(":")[2])))
    channel = MessageChannel(sock)
    message_body = {"incarnation": host.sender.peer.incarnation, "layout": ticket.as_dict()["peer"]["layout"]}
    channel.send_json(MessageKind.HELLO, 1, message_body, soon())
    assert channel.receive(soon()).kind == MessageKind.WELCOME
    body = {**asked, "id": ticket.id if asked["id"] == "T" else asked["id"], "link_options": "closed"}
    for kind in (MessageKind.PULL, MessageKind.OKAY, MessageKind.ATTACH, MessageKind.END):
        channel.send_json(kind, 2, body, soon())
        answer = channel.receive(soon())
        assert answer.kind == MessageKind.ERROR and isinstance(answer.to_error(), BadTransfer | TicketEnded)
    channel.close()
    assert len(host.sender.lease_ages()) == 1


def test_garbage_ends_the_connection_only(host: Host) -> None:
    port = int(host.sender.endpoints["tcp"].rpartition(":")[2])
    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\0" * 64, b"EKV1" + b"\xff" * 60):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(junk)
    host.check_settled()
    assert host.receiver("tcp").pull(host.sender.publish([1], LEASE), [0], soon()).complete


def test_two_pulls_of_one_ticket_share_a_link(host: Host) -> None:
    receiver = host.receiver("tcp", connections=2)
    sent = fill(host.sender.region, [1, 2], 1)
    ticket = host.sender.publish([1, 2], LEASE)
    threads = [threading.Thread(target=receiver.pull, args=(ticket, into, soon())) for into in ([0, 1], [2, 3], [4, 5])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(content(receiver.region, into) == sent for into in ([0, 1], [2, 3], [4, 5]))
    receiver.close()


# -- other processes ---------------------------------------------------------------------------------------------------

CHILD = """
import json, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from emberline.kv.transfer.mooncake import MooncakeEngine
from emberline.kv.transfer.mooncake_server import serve_mooncake
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.shm import SharedSegment, serve_shm
from emberline.kv.transfer.tcp import serve_tcp
from staged_mooncake import serve_staged
from transfer_helpers import fill, small
segment = SharedSegment(small(), 12)
sender = Sender(segment.region, "p")
engine = MooncakeEngine()
servers = [serve_tcp(sender), serve_shm(sender, segment), serve_mooncake(sender, engine), serve_staged(sender, engine)]
sent = fill(segment.region, [4, 5, 1], 1)
print(json.dumps([sender.publish([4, 5, 1], 30.0).as_dict(), sent.hex()]), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_sender_process_dies_or_hangs(kind: str, end: signal.Signals) -> None:
    tests = Path(__file__).parents[1]
    paths = json.dumps([str(tests), str(tests.parent / "src")])
    child = subprocess.Popen([sys.executable, "-c", CHILD, paths], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        message_body, sent = json.loads(child.stdout.readline())
        ticket = Ticket.parse(message_body)
        receiver = Host(None, []).receiver(kind, io_timeout_s=0.5)  # type: ignore[arg-type]
        receiver.pull(ticket, [0, 1, 2], soon())
        assert content(receiver.region, [0, 1, 2]).hex() == sent
        os.kill(child.pid, end)
        os.waitpid(child.pid, os.WUNTRACED)
        with pytest.raises((PeerLost, PeerUnreachable)):
            receiver.pull(ticket, [3, 4, 5], soon())
        with pytest.raises((PeerLost, PeerUnreachable)):
            receiver.acknowledge(ticket, soon())
        if end == signal.SIGKILL:
            gc.collect()
            assert "emberline-kv" not in Path("/proc/self/maps").read_text(), (
                "memory of the dead process is still mapped"
            )
        receiver.close()
    finally:
        child.kill()
        child.wait()


def no_thread(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """Make the start of the n-th thread fail, as if the system allowed no more."""
    start, count = threading.Thread.start, itertools.count()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name and next(count) == at:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_nothing_writes_after_fetch_with_missing_thread(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = host.receiver("tcp", connections=4)
    receiver.connect(host.sender.peer, soon())
    sent = fill(host.sender.region, [4, 5, 1, 7], 1)
    no_thread(monkeypatch, "kv-pull", 1)
    receiver.pull(host.sender.publish([4, 5, 1, 7], LEASE), [0, 3, 2, 9], soon())
    assert content(receiver.region, [0, 3, 2, 9]) == sent
    assert not any(thread.name == "kv-pull" for thread in threading.enumerate())
    receiver.close()
    host.check_settled()


def test_server_accepts_again_after_missing_thread(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = host.receiver("tcp", io_timeout_s=IO_TIMEOUT_S)
    no_thread(monkeypatch, "kv-serve", 0)
    with pytest.raises(PeerLost):
        receiver.connect(host.sender.peer, soon())
    receiver.connect(host.sender.peer, soon())
    receiver.close()
    host.check_settled()
