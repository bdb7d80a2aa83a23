"""Our HTTP server compared with uvicorn (httptools, uvloop): CPU per request and event, start, memory, hostile clients.

pip install uvicorn==0.54.0
python -m emberline.bench.library_http --json benchmarks/results/library-http.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

from emberline.bench import report as reports
from emberline.bench.library_http_child import EVENTS_PER_STREAM
from emberline.bench.report import BenchReport

SERVERS = ("ours", "uvicorn")
CONNECTIONS = 8
# Longer than our server's limits: 20 s to send a head, and twice 60 s if a client stops reading after the first bytes.
IDLE_S, STALLED_S = 27.0, 130.0
FLOOD_BYTES = 4 << 20
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 120}]}).encode()


class ServerUnderTest:
    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def send(self, raw_request: bytes) -> bytes:
        """Send raw bytes on a new connection and return what arrives within a second."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):  # the server may close the connection before it has read everything
                connection.sendall(raw_request)
            return _receive_for(connection, 1.0)

    def fetch_usage(self) -> dict[str, float]:
        with self.connect() as connection:
            found: dict[str, float] = json.loads(
                _exchange_on_all([connection], _make_raw_request("/usage"), _is_sized_reply_complete)[0]
            )
            return found


@contextmanager
def running_server(name: str) -> Iterator[ServerUnderTest]:
    command = [sys.executable, "-m", "emberline.bench.library_http_child", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield ServerUnderTest(json.loads(process.stdout.readline())["port"])
        finally:
            process.kill()


def _make_raw_request(path: str, body: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nuser-agent: bench/1\r\n"
    return f"{head}accept: */*\r\nauthorization: Bearer k\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _is_sized_reply_complete(reply: bytes) -> bool:
    head, end, body = reply.partition(b"\r\n\r\n")
    return bool(end) and len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


def _is_chunked_reply_complete(reply: bytes) -> bool:
    return reply.endswith(b"\r\n0\r\n\r\n")


def _exchange_on_all(
    connections: list[socket.socket], raw_request: bytes, is_complete: Callable[[bytes], bool]
) -> list[bytes]:
    """Send the request on every connection, then return the bodies of the replies."""
    for connection in connections:
        connection.sendall(raw_request)
    bodies = []
    for connection in connections:
        reply = b""
        while not is_complete(reply):
            data = connection.recv(1 << 16)
            assert data, "the server closed the connection"
            reply += data
        bodies.append(reply.partition(b"\r\n\r\n")[2])
    return bodies


def measure_requests_and_streams(server: ServerUnderTest, requests: int, streams: int) -> dict[str, float]:
    """Return the server's CPU time in microseconds per request and per streamed event, and its memory in MB."""
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(CONNECTIONS)]

        def cpu_us(count: int, raw_request: bytes, is_complete: Callable[[bytes], bool]) -> float:
            before = server.fetch_usage()["cpu_s"]
            for _ in range(count // CONNECTIONS):
                _exchange_on_all(connections, raw_request, is_complete)
            return (server.fetch_usage()["cpu_s"] - before) / (count // CONNECTIONS * CONNECTIONS) * 1e6

        cpu_us(200, _make_raw_request("/reply", BODY), _is_sized_reply_complete)  # the first requests take longer
        return {
            "request": cpu_us(requests, _make_raw_request("/reply", BODY), _is_sized_reply_complete),
            "event": cpu_us(streams, _make_raw_request("/stream", BODY), _is_chunked_reply_complete)
            / EVENTS_PER_STREAM,
            "memory": server.fetch_usage()["rss_mb"],
        }


def _receive_for(connection: socket.socket, seconds: float) -> bytes:
    """Return what arrives until the connection is closed or the time has passed."""
    received, deadline = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (data := connection.recv(1 << 16)):
                break
            received += data
    return received


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def check_hostile_requests(server: ServerUnderTest) -> dict[str, bool]:
    """Return for each hostile request or reply whether the server refused it."""
    get, post = b"GET / HTTP/1.1\r\n", b"POST /header-names HTTP/1.1\r\nhost: a\r\n"
    chunked = post + b"transfer-encoding: chunked\r\n\r\n"
    requests = {
        "two_host_headers": get + b"host: a\r\nhost: b\r\n\r\n",
        "no_host_header": get + b"\r\n",
        "length_and_chunked": post + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "head_of_4_mib": get + b"host: a\r\nx: " + b"y" * FLOOD_BYTES + b"\r\n\r\n",
        "10000_headers": get + b"host: a\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
        "trailer_of_4_mib": chunked + b"0\r\nx: " + b"y" * FLOOD_BYTES,
        "chunk_extension_of_4_mib": chunked + b"1;x=" + b"y" * FLOOD_BYTES,
    }
    refused = {name: server.send(raw)[:12].startswith(b"HTTP/1.1 4") for name, raw in requests.items()}
    trailed = server.send(chunked + b"1\r\na\r\n0\r\nauthorization: me\r\n\r\n")
    refused["trailer_seen_as_header"] = b"authorization" not in trailed
    refused["line_break_in_reply_header"] = b"\r\nx-injected: b\r\n" not in server.send(_make_raw_request("/split"))
    return refused


def check_slow_clients(servers: dict[str, ServerUnderTest]) -> dict[str, dict[str, bool]]:
    """Return for each server and each kind of slow client whether the server closed the client's connection."""
    found: dict[str, dict[str, bool]] = {name: {} for name in servers}
    with ExitStack() as stack:
        idle = {name: stack.enter_context(server.connect()) for name, server in servers.items()}
        partial = {name: stack.enter_context(server.connect()) for name, server in servers.items()}
        stalled = {name: stack.enter_context(server.connect()) for name, server in servers.items()}
        for name in servers:
            partial[name].sendall(b"GET / HTTP/1.1\r\nhost: a\r\nx: ")
            stalled[name].sendall(_make_raw_request("/large"))
        time.sleep(IDLE_S)
        for name in servers:
            found[name] |= {"no_request": _is_closed(idle[name]), "half_a_head": _is_closed(partial[name])}
        time.sleep(STALLED_S - IDLE_S)
        for name, server in servers.items():
            found[name]["reply_never_read"] = server.fetch_usage()["open_large_replies"] == 0
    return found


def measure_start() -> dict[str, float]:
    """Return by server the CPU seconds from the start of its process to its first reply."""
    found = {}
    for name in SERVERS:
        with running_server(name) as server:
            found[name] = server.fetch_usage()["cpu_s"]
    return found


def run(rounds: int, requests: int, streams: int) -> BenchReport:
    starts, figures = [], []
    with ExitStack() as stack:
        servers = {name: stack.enter_context(running_server(name)) for name in SERVERS}
        for _ in range(rounds):
            starts.append(measure_start())
            figures.append(
                {name: measure_requests_and_streams(server, requests, streams) for name, server in servers.items()}
            )
        refused = {name: check_hostile_requests(server) for name, server in servers.items()}
        for name, closed in check_slow_clients(servers).items():
            refused[name] |= closed
    versions = {name: version(name) for name in ("uvicorn", "httptools", "uvloop")}
    hostile = {case: {name: refused[name][case] for name in SERVERS} for case in refused["ours"]}
    config: dict[str, Any] = {"rounds": rounds, "requests": requests, "streams": streams, "connections": CONNECTIONS}
    config |= {"clock": "CPU time of the server's process", "versions": versions, "is_refused": hostile}
    report = BenchReport("library-http", config)

    def add(name: str, unit: str, values: dict[str, list[float]]) -> None:
        peer = sorted(values["uvicorn"])[len(values["uvicorn"]) // 2]
        report.add(name, values["ours"], unit, peer=peer)

    for figure, unit in (("request", "us"), ("event", "us"), ("memory", "MB")):
        add(figure, unit, {name: [each[name][figure] for each in figures] for name in SERVERS})
    add("start", "s", {name: [each[name] for each in starts] for name in SERVERS})
    unsafe = {name: sum(not safe for safe in refused[name].values()) for name in SERVERS}
    report.add("hostile_cases_accepted", unsafe["ours"], "cases", peer=unsafe["uvicorn"])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=4000, help="requests in each round")
    parser.add_argument("--streams", type=int, default=80, help=f"streams of {EVENTS_PER_STREAM} events in each round")
    reports.add_report_arguments(parser)
    options = parser.parse_args()
    run(options.rounds, options.requests, options.streams).print_and_save(options.json, options.commit)


if __name__ == "__main__":
    main()
