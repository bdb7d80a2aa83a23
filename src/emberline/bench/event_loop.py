"""`emberline bench event-loop`: how long one heavy request holds the event loop of a server.

Each input is sent to a gateway, a router or an engine server while a second connection asks for /health every 5 ms. The
figure is the longest time that one of those took; `idle` is the same with no heavy request. Every server is a
process of its own; the provider behind the gateway and the worker behind the router are fakes.
"""

from __future__ import annotations

import http.client
import http.server
import json
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from emberline.bench.launch import Launch, running
from emberline.bench.report import Report
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

PROBE_SECONDS = 0.005  # between two probes
READY_SECONDS = 60.0
REPLY_SECONDS = 300.0  # for the heavy request to be answered
CHAT = "/v1/chat/completions"

GATEWAY = """
api_keys = ["bench-0123456789abcdef"]
store = "sqlite:{home}/store"
master_key = "{home}/master"

[gateways.default.providers.fake]
base_url = "{provider}"
[gateways.default.providers.bomb]
base_url = "{bomb}"
[gateways.default.providers.anthropic]
base_url = "{provider}"
[gateways.default]
budgets = [{{ name = "money", limit = 1000000000000, per = "day", unpriced = "pass" }}]

[gateways.cached]
cache_ttl = 3600
[gateways.cached.providers.fake]
base_url = "{provider}"

[gateways.guarded.providers.fake]
base_url = "{provider}"
[[gateways.guarded.guardrails.patterns]]
name = "all"
find = ["payment_card", "iban", "api_key", "private_key", "email", "phone", "ipv4", "ipv6", "us_ssn"]
on = "both"
action = "redact"
"""


@dataclass(frozen=True, slots=True)
class HeavyRequest:
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def chat(content: bytes, model: str) -> bytes:
    """A chat request with one message, whose content is JSON text already."""
    head = json.dumps({"model": model, "max_tokens": 1})[:-1].encode()
    return head + b',"messages":[{"role":"user","content":"' + content + b'"}]}'


def listed(item: bytes, size: int, name: str, model: str) -> bytes:
    """A request with one field that is a list of this item, of about `size` bytes."""
    head = json.dumps({"model": model, "max_tokens": 1})[:-1].encode()
    return head + b',"' + name.encode() + b'":[' + (item + b",") * (size // (len(item) + 1)) + item + b"]}"


MESSAGE = b'{"role":"user","content":"a"}'
PROSE = b"the quick brown fox jumps over the lazy dog. "


def shared_inputs(model: str, size: int) -> dict[str, HeavyRequest]:
    """What every server is sent: text, escapes, and JSON that becomes many small objects."""
    return {
        "prose": HeavyRequest(CHAT, chat(PROSE * (size // len(PROSE)), model)),
        "escapes": HeavyRequest(CHAT, chat(b"\\u00e9" * (size // 6), model)),
        "messages": HeavyRequest(CHAT, listed(MESSAGE, size, "messages", model)),
        "lists": HeavyRequest(CHAT, listed(b"[]", size, "messages", model)),
        "token_ids": HeavyRequest("/v1/completions", listed(b"1", size, "prompt", model)),
    }


def gateway_inputs(size: int) -> dict[str, HeavyRequest]:
    def at(gateway: str, request: HeavyRequest) -> HeavyRequest:
        return HeavyRequest(f"/v1/default/{gateway}/compat/chat/completions", request.body)

    plain = shared_inputs("fake/bench", size)
    prose = plain["prose"].body
    return {
        "guarded_digits": at("guarded", HeavyRequest("", chat(b"4 " * (size // 2), "fake/bench"))),
        "guarded_prose": at("guarded", HeavyRequest("", chat(PROSE * (size // 2 // len(PROSE)), "fake/bench"))),
        **{name: at("default", request) for name, request in plain.items()},
        "cached_prose": at("cached", plain["prose"]),
        "cached_messages": at("cached", plain["messages"]),
        "translated_prose": at("default", HeavyRequest("", prose.replace(b"fake/bench", b"anthropic/claude-x"))),
        "gzip_reply": HeavyRequest("/v1/default/default/bomb/anything", b'{"model":"x"}'),
    }


def engine_inputs(model: str, size: int) -> dict[str, HeavyRequest]:
    return {
        **shared_inputs(model, size),
        "tokenize": HeavyRequest("/tokenize", json.dumps({"model": model, "prompt": "word " * (200_000)}).encode()),
        "short_messages": HeavyRequest(CHAT, listed(MESSAGE, 400_000, "messages", model)),
    }


def bench(model: str | None, size: int, rounds: int) -> Report:
    """`model`: of the engine server; None: it is left out."""
    report = Report("event-loop", {"model": model, "bytes": size, "rounds": rounds, "probe_seconds": PROBE_SECONDS})
    with gateway() as port:
        _measure(report, "gateway", port, gateway_inputs(size), rounds)
    with router() as port:
        _measure(report, "router", port, shared_inputs("fake", size), rounds)
    if model is not None:
        with tempfile.TemporaryDirectory() as home, Launch([model], Path(home) / "log") as server:
            _measure(report, "engine", server.port, engine_inputs(model, size), rounds)
    return report


def _measure(report: Report, server: str, port: int, inputs: dict[str, HeavyRequest], rounds: int) -> None:
    report.add(f"{server}_idle", [1e3 * longest_gap(port, None)[0] for _ in range(rounds)], "ms")
    for name, request in inputs.items():
        found = [longest_gap(port, request) for _ in range(rounds)]
        report.add(f"{server}_{name}", [1e3 * gap for gap, _, _ in found], "ms", limit=100)
        seconds, status = found[-1][1:]
        print(f"{server}_{name}: {max(1e3 * gap for gap, _, _ in found):.0f} ms, {status} after {seconds:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip


def longest_gap(port: int, request: HeavyRequest | None) -> tuple[float, float, int]:
    """Seconds of the slowest probe, seconds until the request was answered, and its status."""
    stop, gaps = threading.Event(), [0.0]

    def probe() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_SECONDS)
        while not stop.is_set():
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            gaps.append(time.perf_counter() - began)
            time.sleep(PROBE_SECONDS)
        connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    began, status = time.perf_counter(), 0
    try:
        if request is None:
            time.sleep(1.0)
        else:
            status = _send(port, request)
    finally:
        seconds = time.perf_counter() - began
        time.sleep(0.1)
        stop.set()
        thread.join()
    return max(gaps), seconds, status


def _send(port: int, request: HeavyRequest) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_SECONDS)
    headers = {"content-type": "application/json", **request.headers}
    try:
        connection.request("POST", request.path, request.body, headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except OSError:  # refused before it was read
        return 0
    finally:
        connection.close()


@cache
def _packed_spaces() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(1024)) + packer.flush()


class _Bomb(http.server.BaseHTTPRequestHandler):
    """Answers with 1 GB of spaces, packed into 1 MB."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        packed = _packed_spaces()
        self.send_response(200)
        for name, value in (("content-type", "application/json"), ("content-encoding", "gzip")):
            self.send_header(name, value)
        self.send_header("content-length", str(len(packed)))
        self.end_headers()
        with suppress(OSError):  # it is refused before it ends
            self.wfile.write(packed)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def gateway() -> Iterator[int]:
    _packed_spaces()  # made before anything is measured
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bomb = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Bomb)
        threading.Thread(target=bomb.serve_forever, daemon=True).start()
        stack.callback(bomb.shutdown)
        provider, port = free_port(), free_port()
        config = home / "gateway.toml"
        urls = {"provider": f"http://127.0.0.1:{provider}", "bomb": f"http://127.0.0.1:{bomb.server_port}"}
        config.write_text(GATEWAY.format(home=home, **urls))
        python = (sys.executable, "-m")
        stack.enter_context(running(*python, "emberline.gateway.fakes.provider", "--port", str(provider)))
        stack.enter_context(running(*python, "emberline.cli", "gateway", "--config", str(config), "--port", str(port)))
        wait_ready(port, "/health")
        yield port


@contextmanager
def router() -> Iterator[int]:
    with ExitStack() as stack:
        port, worker = free_port(), free_port()
        python = (sys.executable, "-m")
        stack.enter_context(running(*python, "emberline.cli", "router", "--port", str(port)))
        wait_ready(port, "/health/live")
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(running(*python, "emberline.cluster.fake", "--router", url, "--port", str(worker)))
        wait_ready(port, "/health/ready")
        yield port


def wait_ready(port: int, path: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise EmberlineError(f"the server at port {port} was not ready within {READY_SECONDS:.0f} s")
