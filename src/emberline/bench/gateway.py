"""`emberline bench gateway`: the gateway's overhead, with authentication, limits, costs and logs turned on.

The same requests are sent to a fake provider directly, through the gateway, and, if it is installed, through LiteLLM.
CPU time is that of the proxy's process and its child processes. The proxies run one after the other, each pinned to the
same core.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import msgspec

from emberline.bench import cores, processes
from emberline.bench.blocking_client import BlockingClient
from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection
from emberline.bench.report import BenchReport
from emberline.bench.server_launch import running_process
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

T = TypeVar("T")

READY_TIMEOUT_S = 60.0
KEY = "sk-bench-0123456789abcdef"
SOAK_EVENTS = 500  # events of one stream


@dataclass(frozen=True, slots=True)
class BenchedAPI:
    """The API in which clients, proxies and the fake provider exchange messages."""

    path: str
    cached_path: str  # of our gateway, for requests whose replies it caches
    provider: str  # name of the fake provider
    litellm_provider: str
    litellm_base: str  # appended to the provider's URL
    litellm_environment: dict[str, str]
    num_other_events: int  # events of a stream beside its content
    last_event: bytes  # occurs in the last event of a stream


APIS = {
    "chat": BenchedAPI(
        "/v1/chat/completions", "/v1/default/cached/compat/chat/completions", "fake", "openai", "/v1", {}, 3, b"[DONE]"
    ),
    # LITELLM_RUST turns on what LiteLLM has in Rust for this API; its proxy in 1.109.1 stays in Python all the same.
    "messages": BenchedAPI(
        "/v1/messages",
        "/v1/default/cached/anthropic/v1/messages",
        "anthropic",
        "anthropic",
        "",
        {"LITELLM_RUST": "true"},
        5,
        b"message_stop",
    ),
}


@dataclass(frozen=True, slots=True)
class GatewayBenchPlan:
    requests: int
    clients: int  # connections with a request open at any time
    prompt: int  # bytes
    streams: int  # open at any time
    events: int  # of one stream
    pace: float  # seconds between two events
    soak: int  # events of the memory measurement
    rounds: int
    api: str = "chat"  # a key of APIS

    @property
    def benched_api(self) -> BenchedAPI:
        return APIS[self.api]


@dataclass(frozen=True, slots=True)
class BenchedProxy:
    """The server that the benchmark sends requests to: a proxy, or the provider without a proxy."""

    name: str
    url: str
    pid: int | None  # None: no proxy
    path: str
    model: str


@dataclass(frozen=True, slots=True)
class GatewayBenchRun:
    work: int  # requests, or events
    wall: float
    cpu: float
    seconds: list[float]  # of each request; of a stream, to its first content
    rss: int


GATEWAY = """
api_keys = [{key}]
store = "sqlite:{home}/store"
master_key = "{home}/master"

[gateways.default]
authentication = true
limits = [{{ name = "requests", limit = 1000000000, per = "minute", split = ["key"] }}]
budgets = [{{ name = "money", limit = 1000000000000, per = "day", split = ["key"] }}]
[gateways.default.prices."{name}/bench"]
input = 150000
output = 600000
[gateways.default.providers.{name}]
base_url = "{provider}"
key = "none"

[gateways.cached]
cache_ttl = 3600
authentication = true
[gateways.cached.providers.{name}]
base_url = "{provider}"
key = "none"
"""
LITELLM = """
model_list:
  - model_name: {name}/bench
    litellm_params:
      model: {litellm_provider}/bench
      api_base: {provider}{base}
      api_key: none
      input_cost_per_token: 0.00000015
      output_cost_per_token: 0.0000006
general_settings:
  master_key: {key}
"""


def bench(plan: GatewayBenchPlan, peers_dir: Path | None) -> BenchReport:
    """Run the benchmark. LiteLLM is measured too if `peers_dir`, the directory of its Python environment, is given."""
    report = BenchReport("gateway", {name: getattr(plan, name) for name in plan.__slots__})
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        core = stack.enter_context(cores.reserve_core())
        port = free_port()
        provider = f"http://127.0.0.1:{port}"
        fake = (sys.executable, "-m", "emberline.gateway.fakes.provider", "--port", str(port), "--pace", str(plan.pace))
        stack.enter_context(running_process(*fake))
        api = plan.benched_api
        direct = BenchedProxy("direct", provider, None, api.path, "bench")
        _run_on_uvloop(_wait_until_ready(direct))
        launches = {"ours": partial(_running_gateway, api, home, provider, core)}
        if peers_dir is not None:
            launches["litellm"] = partial(_running_litellm, api, home, provider, core, peers_dir)
        rounds_by_proxy: dict[str, list[GatewayBenchRound]] = {name: [] for name in launches}
        # Alternating, since the machine's speed varies by the minute; each time a new process, since processes differ.
        for _ in range(plan.rounds):
            for name, launch in launches.items():
                with launch() as proxy:
                    rounds_by_proxy[name].append(_measure_proxy(plan, proxy, direct))
        with launches["ours"]() as ours:
            _measure_proxy(plan, ours, direct)  # warm up: pools and caches fill
            grown = _run_on_uvloop(_measure_memory_growth(plan, ours, provider))
    _add_results(report, rounds_by_proxy)
    report.add("rss_growth", grown / 1e6, "MB")
    return report


def _run_on_uvloop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on uvloop, which uses less CPU time than asyncio's own event loop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


@dataclass(frozen=True, slots=True)
class GatewayBenchRound:
    """The measurements of one proxy process.

    `loaded` has many requests open at once, and `alone` has one at a time. `base` is measured like `alone`, but the
    requests go directly to the provider.
    """

    loaded: GatewayBenchRun
    alone: GatewayBenchRun
    base: GatewayBenchRun
    streams: GatewayBenchRun
    short: GatewayBenchRun  # streams of one event
    hits: GatewayBenchRun | None  # only of proxies with a cache


def _measure_proxy(plan: GatewayBenchPlan, proxy: BenchedProxy, direct: BenchedProxy) -> GatewayBenchRound:
    _run_on_uvloop(_wait_until_ready(proxy))
    cached = replace(proxy, path=plan.benched_api.cached_path) if proxy.name == "ours" else None

    def measure_round() -> GatewayBenchRound:
        return GatewayBenchRound(
            loaded=_run_on_uvloop(_run_concurrent(proxy, plan)),
            alone=_run_sequential(proxy, plan),
            base=_run_sequential(direct, plan),
            streams=_run_on_uvloop(_run_streams(proxy, plan, plan.events)),
            short=_run_on_uvloop(_run_streams(proxy, plan, 1)),
            hits=None if cached is None else _run_sequential(cached, plan, same_prompt=True),
        )

    measure_round()  # warm up
    return measure_round()


async def _measure_memory_growth(plan: GatewayBenchPlan, proxy: BenchedProxy, provider_url: str) -> int:
    """Stream many events through the proxy as fast as possible, and return by how many bytes its memory grew."""
    await MinimalHTTPConnection(provider_url).fetch("/fake", msgspec.json.encode({"pace": 0.0}))
    size = max(1, min(SOAK_EVENTS, plan.soak // (2 * plan.streams)))
    rounds = max(2, plan.soak // (size * plan.streams))
    rss = [(await _run_streams(proxy, plan, size)).rss for _ in range(rounds)]
    return rss[-1] - rss[rounds // 5]


def _add_results(report: BenchReport, rounds_by_proxy: dict[str, list[GatewayBenchRound]]) -> None:
    figures = {name: _compute_figures(rounds) for name, rounds in rounds_by_proxy.items()}
    ours, *others = figures.values()
    limits = {"cpu_per_request": 500.0, "cpu_per_event": 60.0, "added_p50": 1.0, "added_p99": 5.0, "rss": 120.0}
    for name, (values, unit) in ours.items():
        peer = median(others[0][name][0]) if others else None
        report.add(name, values, unit, peer=peer, limit=limits.get(name))
    hits = [each.hits for each in rounds_by_proxy["ours"] if each.hits is not None]
    report.add("cache_hit_p50", [1e3 * median(turn.seconds) for turn in hits], "ms", limit=0.3)
    report.add("cache_hit_cpu", [1e6 * turn.cpu / turn.work for turn in hits], "us")


def _compute_figures(rounds: Sequence[GatewayBenchRound]) -> dict[str, tuple[list[float], str]]:
    events = [1e6 * (each.streams.cpu - each.short.cpu) / (each.streams.work - each.short.work) for each in rounds]
    added = [
        [1e3 * (q - b) for q, b in zip(_latency_p50_and_p99(each.alone), _latency_p50_and_p99(each.base), strict=True)]
        for each in rounds
    ]
    return {
        "cpu_per_request": ([1e6 * each.loaded.cpu / each.loaded.work for each in rounds], "us"),
        "cpu_per_event": (events, "us"),
        "requests": ([each.loaded.work / each.loaded.wall for each in rounds], "req/s"),
        "added_p50": ([each[0] for each in added], "ms"),
        "added_p99": ([each[1] for each in added], "ms"),
        "first_content_p50": ([1e3 * median(each.streams.seconds) for each in rounds], "ms"),
        "rss": ([each.streams.rss / 1e6 for each in rounds], "MB"),
    }


def _latency_p50_and_p99(run: GatewayBenchRun) -> tuple[float, float]:
    cuts = quantiles(run.seconds, n=100)
    return cuts[49], cuts[98]


def _run_sequential(proxy: BenchedProxy, plan: GatewayBenchPlan, same_prompt: bool = False) -> GatewayBenchRun:
    """Send `plan.requests` requests one after the other, enough for a meaningful p99 latency."""
    caller = BlockingClient(proxy.url, KEY)
    seconds: list[float] = []
    before, start = _read_process_usage(proxy), time.perf_counter()
    for number in range(plan.requests):
        body = _make_request_body(proxy, plan, 0 if same_prompt else number, 8, stream=False)
        began = time.perf_counter()
        reply = caller.post(proxy.path, body)
        seconds.append(time.perf_counter() - began)
        _check_reply(reply)
    wall, after = time.perf_counter() - start, _read_process_usage(proxy)
    caller.close()
    return GatewayBenchRun(plan.requests, wall, after.cpu - before.cpu, seconds, after.rss)


async def _run_concurrent(proxy: BenchedProxy, plan: GatewayBenchPlan) -> GatewayBenchRun:
    """Send requests from `plan.clients` clients at once. Each client sends its next request after a reply."""
    left = iter(range(plan.requests))
    seconds: list[float] = []

    async def run_client() -> None:
        connection = MinimalHTTPConnection(proxy.url, KEY)
        for number in left:
            body = _make_request_body(proxy, plan, number, 8, stream=False)
            began = time.perf_counter()
            reply = await connection.fetch(proxy.path, body)
            seconds.append(time.perf_counter() - began)
            _check_reply(reply)
        connection.close()

    return await _measure_clients(proxy, [run_client() for _ in range(plan.clients)], plan.requests, seconds)


def _check_reply(reply: bytes) -> None:
    if b"word7" not in reply:
        raise EmberlineError(f"a reply does not contain the expected text: {reply[:200]!r}")


async def _run_streams(proxy: BenchedProxy, plan: GatewayBenchPlan, events_per_stream: int) -> GatewayBenchRun:
    first: list[float] = []
    api = plan.benched_api
    num_events = events_per_stream + api.num_other_events

    async def run_client(phase: float) -> None:
        await asyncio.sleep(phase * plan.pace)  # spreads the streams' events over time
        connection = MinimalHTTPConnection(proxy.url, KEY)
        began, got, last = time.perf_counter(), 0, b""
        async for part in connection.stream_reply(
            proxy.path, _make_request_body(proxy, plan, int(phase * 1e6), events_per_stream, stream=True)
        ):
            if not got:
                first.append(time.perf_counter() - began)
            got += part.count(b"\n\n")
            last = part
        if got < events_per_stream + 1 or api.last_event not in last[-200:]:
            raise EmberlineError(f"a stream ended after {got} of {num_events} events: {last[-200:]!r}")
        connection.close()

    work = [run_client(i / plan.streams) for i in range(plan.streams)]
    return await _measure_clients(proxy, work, plan.streams * num_events, first)


async def _measure_clients(
    proxy: BenchedProxy, clients: Sequence[object], work_count: int, latencies_s: list[float]
) -> GatewayBenchRun:
    before = _read_process_usage(proxy)
    began = time.perf_counter()
    await asyncio.gather(*clients)  # type: ignore[call-overload]
    wall, after = time.perf_counter() - began, _read_process_usage(proxy)
    return GatewayBenchRun(work_count, wall, after.cpu - before.cpu, latencies_s, after.rss)


def _read_process_usage(proxy: BenchedProxy) -> processes.ProcessUsage:
    if proxy.pid is None:
        return processes.ProcessUsage(0.0, 0)
    used = [processes.read_usage(pid) for pid in processes.find_process_tree(proxy.pid).values()]
    there = [each for each in used if each is not None]
    return processes.ProcessUsage(sum(each.cpu for each in there), sum(each.rss for each in there))


def _make_request_body(
    proxy: BenchedProxy, plan: GatewayBenchPlan, prompt_number: int, max_tokens: int, *, stream: bool
) -> bytes:
    content = f"{prompt_number} ".ljust(plan.prompt, "x")
    asked = {"model": proxy.model, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return msgspec.json.encode({**asked, **({"stream": True} if stream else {})})


async def _wait_until_ready(proxy: BenchedProxy) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    body = msgspec.json.encode({"model": proxy.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8})
    while time.monotonic() < deadline:
        try:
            await MinimalHTTPConnection(proxy.url, KEY).fetch(proxy.path, body)
            return
        except HTTPRequestFailed:
            await asyncio.sleep(0.2)
    raise EmberlineError(f"proxy {proxy.name} did not become ready in {READY_TIMEOUT_S:.0f} s")


@contextmanager
def _running_gateway(api: BenchedAPI, work_dir: Path, provider_url: str, core: int | None) -> Iterator[BenchedProxy]:
    port, file = free_port(), work_dir / "gateway.toml"
    file.write_text(GATEWAY.format(key=json.dumps(KEY), home=work_dir, name=api.provider, provider=provider_url))
    command = (sys.executable, "-m", "emberline.cli", "gateway", "--config", str(file), "--port", str(port))
    with running_process(*command) as process:
        cores.pin_process(process.pid, core)
        yield BenchedProxy("ours", f"http://127.0.0.1:{port}", process.pid, api.path, f"{api.provider}/bench")


@contextmanager
def _running_litellm(
    api: BenchedAPI, work_dir: Path, provider_url: str, core: int | None, peers_dir: Path
) -> Iterator[BenchedProxy]:
    program = peers_dir / "litellm" / "bin" / "litellm"
    if not program.exists():
        raise EmberlineError(
            f"LiteLLM is not installed: {program} does not exist", hint="run scripts/bench-peers litellm"
        )
    port, file = free_port(), work_dir / "litellm.yaml"
    settings = {"name": api.provider, "litellm_provider": api.litellm_provider, "base": api.litellm_base}
    file.write_text(LITELLM.format(key=KEY, provider=provider_url, **settings))
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", **api.litellm_environment}
    command = (str(program), "--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
    with running_process(*command, **environment) as process:
        cores.pin_process(process.pid, core)
        yield BenchedProxy("litellm", f"http://127.0.0.1:{port}", process.pid, api.path, f"{api.provider}/bench")
