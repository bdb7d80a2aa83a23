"""`emberline bench event-loop`: how long one large request blocks the event loop of a server.

Each large request is sent to a gateway, a router or an engine server, while a second connection requests /health every
5 ms. The result is the longest duration of a /health request in all rounds. The result `idle` is the same without a
large request. The servers, the sender and the process that requests /health are separate processes. The providers
behind the gateway and the workers behind the router are fakes.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from websockets.sync.client import connect

from emberline.bench.event_loop_inputs import (
    HeavyRequest,
    make_engine_requests,
    make_gateway_requests,
    make_router_requests,
)
from emberline.bench.event_loop_probe import PROBE_SECONDS, HealthProbe
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import EmberlineServer, running_process
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

READY_SECONDS = 60.0
REPLY_SECONDS = 300.0  # seconds for the reply to the heavy request

GATEWAY = """
api_keys = ["bench-0123456789abcdef"]
store = "sqlite:{home}/store"
master_key = "{home}/master"

[gateways.default.providers.fake]
base_url = "{provider}"
[gateways.default.providers.heavy]
base_url = "{heavy}"
[gateways.default.providers.anthropic]
base_url = "{provider}"
key = "any"
[gateways.default]
budgets = [{{ name = "money", limit = 1000000000000, per = "day", unpriced = "pass" }}]

[gateways.cached]
cache_ttl = 3600
[gateways.cached.providers.fake]
base_url = "{provider}"

[gateways.routed]
cache_ttl = 3600
[gateways.routed.providers.fake]
base_url = "{provider}"
[gateways.routed.pools.both]
members = [{{ provider = "fake", model = "one" }}, {{ provider = "fake", model = "two" }}]
[[gateways.routed.routes.by-text.elements]]
id = "start"
type = "start"
outputs.next.elementId = "text"
[[gateways.routed.routes.by-text.elements]]
id = "text"
type = "conditional"
properties.condition."body.messages.0.content"."$regex" = "lazy cat$"
outputs.true.elementId = "model"
outputs.false.elementId = "model"
[[gateways.routed.routes.by-text.elements]]
id = "model"
type = "model"
properties = {{ provider = "fake", model = "bench" }}
outputs.success.elementId = "end"
[[gateways.routed.routes.by-text.elements]]
id = "end"
type = "end"

[gateways.guarded.providers.fake]
base_url = "{provider}"
[gateways.guarded.providers.heavy]
base_url = "{heavy}"
[[gateways.guarded.guardrails.patterns]]
name = "all"
find = ["payment_card", "iban", "api_key", "private_key", "email", "phone", "ipv4", "ipv6", "us_ssn"]
on = "both"
action = "redact"
"""


class DelayMeasurement(NamedTuple):
    longest_delay_s: float  # longest duration of a /health request
    request_s: float  # duration of the large request
    status: int  # of the reply to the large request; 0 without a reply


def bench(model: str | None, body_bytes: int, rounds: int) -> BenchReport:
    """Measure the gateway, the router and, unless `model` is None, an engine server with this model."""
    report = BenchReport(
        "event-loop", {"model": model, "bytes": body_bytes, "rounds": rounds, "probe_seconds": PROBE_SECONDS}
    )
    with running_gateway(body_bytes) as port:
        _measure_server(report, "gateway", port, make_gateway_requests(body_bytes), rounds)
    with running_router() as port:
        _measure_server(report, "router", port, make_router_requests(body_bytes), rounds)
    if model is not None:
        with running_engine_server(model) as port:
            _measure_server(report, "engine", port, make_engine_requests(model, body_bytes), rounds)
    return report


def _measure_server(
    report: BenchReport, server_name: str, port: int, requests_by_name: dict[str, HeavyRequest], rounds: int
) -> None:
    _add_worst_delay(
        report, f"{server_name}_idle", [1e3 * measure_longest_delay(port, None).longest_delay_s for _ in range(rounds)]
    )
    for name, request in requests_by_name.items():
        found = [measure_longest_delay(port, request) for _ in range(rounds)]
        gaps = [1e3 * one.longest_delay_s for one in found]
        _add_worst_delay(report, f"{server_name}_{name}", gaps, limit=100)
        seconds, status = found[-1].request_s, found[-1].status
        print(f"{server_name}_{name}: {max(gaps):.0f} ms, {status} after {seconds:.1f} s", file=sys.stderr, flush=True)


def _add_worst_delay(report: BenchReport, name: str, delays_ms: list[float], limit: float | None = None) -> None:
    """Report the largest delay of all rounds, not the median: `limit` must hold for every request."""
    report.add(name, max(delays_ms), "ms", limit=limit, spread=(min(delays_ms), max(delays_ms)))


def measure_longest_delay(port: int, request: HeavyRequest | None) -> DelayMeasurement:
    """Send a large request while /health is requested repeatedly, and return the times.

    With `request` None, only /health is requested, for one second.
    """
    began, status = time.perf_counter(), 0
    with HealthProbe(port) as probe:
        began = time.perf_counter()
        if request is None:
            time.sleep(1.0)
        else:
            status = _send_request(port, request)
        seconds = time.perf_counter() - began
        time.sleep(0.1)
    return DelayMeasurement(probe.longest_delay_s, seconds, status)


def _send_request(port: int, request: HeavyRequest) -> int:
    """Send the large request and return the HTTP status of the reply.

    Return 0 if the server closed the connection before it had read the request.
    """
    if request.socket:
        return _send_websocket_message(port, request)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_SECONDS)
    headers = {"content-type": "application/json", **request.headers}
    try:
        connection.request("POST", request.path, request.body, headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except OSError:
        return 0
    finally:
        connection.close()


def _send_websocket_message(port: int, request: HeavyRequest) -> int:
    with connect(f"ws://127.0.0.1:{port}{request.path}", max_size=None, compression=None) as socket:
        socket.send(request.body, text=True)
        while True:
            message = json.loads(socket.recv(REPLY_SECONDS))
            if message["type"] in ("universal.done", "universal.error"):
                return int(message["metadata"].get("status", 400))


@contextmanager
def _running_heavy_upstream(reply_bytes: int) -> Iterator[str]:
    port = free_port()
    with running_process(sys.executable, "-m", "emberline.bench.event_loop_upstream", str(port), str(reply_bytes)):
        wait_until_healthy(port, "/health")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running_gateway(reply_bytes: int) -> Iterator[int]:
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        heavy = stack.enter_context(_running_heavy_upstream(reply_bytes))
        provider, port = free_port(), free_port()
        config = home / "gateway.toml"
        config.write_text(GATEWAY.format(home=home, provider=f"http://127.0.0.1:{provider}", heavy=heavy))
        python = (sys.executable, "-m")
        stack.enter_context(running_process(*python, "emberline.gateway.fakes.provider", "--port", str(provider)))
        stack.enter_context(
            running_process(*python, "emberline.cli", "gateway", "--config", str(config), "--port", str(port))
        )
        wait_until_healthy(port, "/health")
        yield port


@contextmanager
def running_router() -> Iterator[int]:
    with ExitStack() as stack:
        port, worker = free_port(), free_port()
        python = (sys.executable, "-m")
        foreign = f"vllm={stack.enter_context(_running_heavy_upstream(0))}"
        stack.enter_context(
            running_process(*python, "emberline.cli", "router", "--port", str(port), "--foreign", foreign)
        )
        wait_until_healthy(port, "/health/live")
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(running_process(*python, "emberline.cluster.fake", "--router", url, "--port", str(worker)))
        wait_until_healthy(port, "/health/ready")
        yield port


@contextmanager
def running_engine_server(model: str) -> Iterator[int]:
    """Run an engine server that is registered with a router (a worker), and yield its port.

    Unlike an engine server without a router, a worker also serves the /cluster paths.
    """
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        stack.enter_context(running_process(sys.executable, "-m", "emberline.cli", "router", "--port", str(port)))
        wait_until_healthy(port, "/health/live")
        arguments = [model, "--router", f"http://127.0.0.1:{port}"]
        yield stack.enter_context(EmberlineServer(arguments, home / "log")).port


def wait_until_healthy(port: int, path: str) -> None:
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
    raise EmberlineError(f"the server at port {port} did not become ready in {READY_SECONDS:.0f} s")
