"""ChaosCluster: routers and workers, started with the usual commands, with a proxy on each connection.

The proxies inject faults. If there are several routers, clients reach them through a TCP balancer. A supervisor
restarts processes that die. A reference server, into which no faults are injected, runs beside the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.chaos.chaos_process import ChaosProcess
from emberline.chaos.clock import ShiftedClock
from emberline.chaos.fault_proxy import FaultProxy, ProxiedConnection, TrafficFilter
from emberline.chaos.network import LOOPBACK_ADDRESS, ChaosNetwork
from emberline.chaos.request_progress import RequestObserver, RequestProgress
from emberline.chaos.tcp_balancer import TCPBalancer
from emberline.cluster.cluster_health import describe_held_resources, find_unavailable_workers, wait_until_no_problem
from emberline.cluster.supervisor import SupervisedProcess, Supervisor
from emberline.core.config import Role
from emberline.core.keys import CLUSTER_KEY_VARIABLE, make_key_environment
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamFailed

CLUSTER_KEY_HEADER = "x-emberline-cluster-key"  # workers accept direct calls only with the cluster key
SERVED_MODEL_NAME = "chaos"
REGISTER_REQUEST_START = b"POST /cluster/register"
SHM_FIELD, DISABLED_SHM_FIELD = b'"shm":"', b'"off":"'
FAULT_COUNTER_PATTERN = re.compile(
    r"^(emberline:kv_(?:tier_damaged_blocks|tier_errors|transfer_pull_failures)_total\{.*\}) (\S+)$", re.M
)
STORE_READY_PATTERN = re.compile(r'^emberline:kv_tier_on\{.*tier="store".*\} 1', re.M)
STORE_PROGRAM = Path(sys.executable).with_name("mooncake_master")
CONNECT_TIMEOUT_S = 30.0
RESTART_TIMEOUT_S = 120.0  # for a killed process to be ready again
IDLE_TIMEOUT_S = 30.0  # for an idle cluster to release all resources


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    model: str
    prefill: int = 1
    decode: int = 2
    routers: int = 1
    kv_memory: str = "48M"
    disk: str = "64M"
    links: bool = False  # each worker has its own network namespace
    deadline: float = 60.0  # seconds per request
    router: Sequence[str] = (
        "--split-tokens",
        "64",
        "--stuck-after",
        "12",  # longer than a lease: a worker whose blocks wait for a dead worker's fetch is not stuck
        "--lost-after",
        "2.5",
        "--ticket-timeout",
        "4",
        "--migration-wait",
        "30",
    )
    worker: Sequence[str] = ("--embedder", "none", "--threads", "1", "--device", "cpu", "--max-running", "4",
                             "--max-batch-tokens", "64", "--stall-timeout", "15")  # fmt: skip


class ChaosCluster:
    def __init__(self, settings: ChaosSettings, directory: Path) -> None:
        self.settings, self.directory = settings, directory
        self.observer = RequestObserver()
        self._cluster_key = secrets.token_hex(16)
        # Every request has a connection of its own, so that a killed process breaks only the requests that it had.
        self.pool = HTTPConnectionPool(connect_timeout_s=CONNECT_TIMEOUT_S, idle_timeout_s=0.0)
        self.supervisor_events: list[str] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        self._supervisor = Supervisor(lambda name, event: self.supervisor_events.append(f"{name} {event}"))
        self.network = ChaosNetwork(links=settings.links)
        self._transfer_address_pattern = re.compile(
            rb'"incarnation":"(\w+)".*?"tcp":"%b:(\d+)"' % self.network.hub.encode(), re.DOTALL
        )
        self.routers = [self._new_process(f"router-{i + 1}" if i else "router") for i in range(settings.routers)]
        self._balancer = TCPBalancer(
            LOOPBACK_ADDRESS,
            0,
            (LOOPBACK_ADDRESS, self.routers[0].port),
            self._observe_router,
            servers=[(LOOPBACK_ADDRESS, router.port) for router in self.routers],
        )
        self.reference = self._new_process("reference")
        self.store = self._new_process("store") if STORE_PROGRAM.exists() else None
        self.workers: list[ChaosProcess] = []

    def workers_with_role(self, role: Role) -> list[ChaosProcess]:
        return [worker for worker in self.workers if worker.role == role]

    def find_worker(self, name: str | None) -> ChaosProcess | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    @property
    def has_several_routers(self) -> bool:
        return len(self.routers) > 1

    @property
    def client_url(self) -> str:
        """The address for clients: that of the router or, if there are several, of the balancer."""
        return f"http://{LOOPBACK_ADDRESS}:{self._balancer.port}" if self.has_several_routers else self.routers[0].url

    def router_of(self, progress: RequestProgress) -> ChaosProcess:
        """Return the router that carries a request."""
        return next((router for router in self.routers if router.port == progress.router_port), self.routers[0])

    # -- starting and stopping -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        settings = self.settings
        self.reference.child.arguments += ["serve", settings.model, "--served-name", SERVED_MODEL_NAME, "--port",
                                           str(self.reference.port), "--embedder", "none", "--threads", "1",
                                           "--device", "cpu", "--kv-memory", "256M"]  # fmt: skip
        for router in self.routers:
            router.child.arguments += ["router", "--allowed-hosts", self.network.hub, "--port", str(router.port),
                                       "--request-timeout", str(settings.deadline), *settings.router,
                                       *(["--event-ids"] if self.has_several_routers else [])]  # fmt: skip
        if self.has_several_routers:
            await self._balancer.start()
        for process in filter(None, (*self.routers, self.reference, self._add_store_process())):
            await self._supervisor.start(process.child)
        counts: dict[Role, int] = {"prefill": settings.prefill, "decode": settings.decode}
        for role, count in counts.items():
            for i in range(count):
                uses_shared_memory = role == "decode" and i % 2 == 1 and not settings.links
                self.workers.append(
                    await self._new_worker(f"{role}-{i + 1}", role, uses_shared_memory=uses_shared_memory)
                )
        for process in self.workers:
            await self._supervisor.start(process.child)

    def _add_store_process(self) -> ChaosProcess | None:
        if self.store is not None:
            self.store.host, self.store.child.program = self.network.hub, (str(STORE_PROGRAM),)
            self.store.child.arguments += [f"--rpc_address={self.store.host}", f"--rpc_port={self.store.port}",
                                           f"--metrics_port={self.network.find_free_port()}",
                                           f"--metrics_host={LOOPBACK_ADDRESS}",
                                           "--logtostderr", "--minloglevel=2"]  # fmt: skip
        return self.store

    async def stop(self) -> None:
        for process in filter(None, (*self.workers, *self.routers, self.store)):
            if process.child.process is not None:
                process.send_signal(signal.SIGCONT, include_engine=True)
            if process.link is not None:
                process.link.end_disturbance()
            for proxy in process.proxies():
                proxy.end_faults()
        await self._supervisor.stop()
        for process in self.workers:
            for proxy in process.proxies():
                proxy.stop()
        self._balancer.stop()
        self.network.close()
        self.pool.close()

    async def _new_worker(self, name: str, role: Role, *, uses_shared_memory: bool) -> ChaosProcess:
        process = self._new_process(name, role)
        process.disk, process.uses_shared_memory, process.link = (
            self.directory / "disk" / name,
            uses_shared_memory,
            self.network.add_worker_link(),
        )
        if process.link is not None:
            process.host, process.child.program = (
                process.link.host,
                (*process.link.namespace_command_prefix, *process.child.program),
            )
        process.disk.mkdir(parents=True)
        hub, filter_heartbeats = self.network.hub, self._make_heartbeat_filter(process)
        process.heartbeats = [
            await FaultProxy(hub, 0, (LOOPBACK_ADDRESS, router.port), filter_heartbeats).start()
            for router in self.routers
        ]
        process.requests = await FaultProxy(
            hub, process.port, (process.host, process.port), self._make_request_filter(process)
        ).start()
        process.child.arguments += self.worker_arguments(
            process, process.host, process.port, hub, [f"http://{hub}:{proxy.port}" for proxy in process.heartbeats]
        )
        return process

    def worker_arguments(
        self, process: ChaosProcess, host: str, port: int, public_host: str, router_urls: Sequence[str]
    ) -> list[str]:
        """Return a worker's command line. `public_host`: the address at which other processes reach the worker."""
        settings, store = self.settings, self.store
        store_options = (
            ["--kv-store", f"{store.host}:{store.port}", "--kv-store-memory", "32M"] if store is not None else []
        )
        if store is not None and not store.host.startswith("127."):
            store_options += ["--kv-mooncake-host", store.host if host == LOOPBACK_ADDRESS else host]
        return ["worker", settings.model, "--served-name", SERVED_MODEL_NAME, "--role", str(process.role),
                "--worker-name", process.name, "--host", host, "--port", str(port), "--worker-url", f"http://{public_host}:{port}",
                "--router", ",".join(router_urls), "--kv-memory", settings.kv_memory, "--kv-disk", str(process.disk),
                "--kv-disk-size", settings.disk, *store_options, *settings.worker]  # fmt: skip

    def _new_process(self, name: str, role: Role | None = None) -> ChaosProcess:
        clock = ShiftedClock(self.directory / "clocks" / name)
        base_environment = {**os.environ, **make_key_environment([self._cluster_key], CLUSTER_KEY_VARIABLE)}
        path = (
            f"{clock.path}:{base_environment['PYTHONPATH']}" if base_environment.get("PYTHONPATH") else str(clock.path)
        )
        supervised = SupervisedProcess(
            name, [], self.directory / f"{name}.log", {**base_environment, "PYTHONPATH": path}
        )
        return ChaosProcess(name, role, self.network.find_free_port(), supervised, clock)

    def _observe_router(self, connection: ProxiedConnection, is_to_server: bool, data: bytes) -> bytes:
        if is_to_server:
            self.observer.observe_router(connection.server_writer.get_extra_info("peername")[1], data)
        return data

    # -- traffic filters -----------------------------------------------------------------------------------------------

    def _make_heartbeat_filter(self, process: ChaosProcess) -> TrafficFilter:
        def filter_heartbeats(connection: ProxiedConnection, is_to_server: bool, data: bytes) -> bytes:
            if is_to_server and data.startswith(REGISTER_REQUEST_START):
                connection.tail = b"registers"
            if is_to_server and connection.tail and (found := self._transfer_address_pattern.search(data)) is not None:
                connection.tail = b""
                process.incarnation = found[1].decode()
                self._handle_registration(process, int(found[2]))
            return data if process.uses_shared_memory or is_to_server else data.replace(SHM_FIELD, DISABLED_SHM_FIELD)

        return filter_heartbeats

    def _make_request_filter(self, process: ChaosProcess) -> TrafficFilter:
        observe = self.observer.make_traffic_filter(process.name)

        def filter_requests(connection: ProxiedConnection, is_to_server: bool, data: bytes) -> bytes:
            data = observe(connection, is_to_server, data)
            return (
                data.replace(SHM_FIELD, DISABLED_SHM_FIELD) if is_to_server and not process.uses_shared_memory else data
            )

        return filter_requests

    def _handle_registration(self, process: ChaosProcess, transfer_port: int) -> None:
        """Restart the worker's proxies after its process has registered.

        `transfer_port`: the port at which the new process serves KV transfers."""
        if process.blocks is None or process.blocks.port != transfer_port:
            if process.blocks is not None:
                process.blocks.stop()
            process.blocks = FaultProxy(self.network.hub, transfer_port, (process.host, transfer_port))
            self._start_task(process.blocks.start())
        assert process.requests is not None
        self._start_task(process.requests.start())

    def _start_task(self, coroutine: Any) -> None:
        self._tasks.add(task := asyncio.ensure_future(coroutine))
        task.add_done_callback(self._tasks.discard)

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill_process(self, process: ChaosProcess) -> None:
        """Kill a process, and let its proxies refuse connections until the process is restarted."""
        process.child.restart_pause_s = 0.5  # an intended death must not lengthen the pause
        process.incarnation = None
        process.outages.append([asyncio.get_running_loop().time()])
        process.send_signal(signal.SIGKILL)
        if process.requests is not None:
            process.requests.stop()
        if process.blocks is not None:
            process.blocks.stop()
            process.blocks = None

    # -- health --------------------------------------------------------------------------------------------------------

    async def fetch_json(self, url: str, timeout_s: float = 5.0) -> Any:
        """Return the JSON body of a reply. Return None if the server does not answer or answers with an error."""
        try:
            reply = await self.pool.fetch("GET", url, {CLUSTER_KEY_HEADER: self._cluster_key}, timeout_s=timeout_s)
            return json.loads(reply.body) if reply.status < 400 else None
        except (UpstreamFailed, ValueError):
            return None

    async def describe_first_problem(self) -> str:
        """Return the first problem that keeps the cluster from being healthy, or "" if the cluster is healthy."""
        absent = await self.find_unavailable_processes()
        return next(iter(absent.values()), "")

    async def find_unavailable_processes(self, excluded_names: Collection[str] = ()) -> dict[str, str]:
        """Return why each unavailable process is unavailable, by process name.

        The processes in `excluded_names` are not checked."""
        started_at = asyncio.get_running_loop().time()
        workers = [worker for worker in self.workers if worker.name not in excluded_names]
        stats, unavailable, problems = await self._fetch_stats_by_worker(workers), dict[str, str](), dict[str, str]()
        for router in self.routers:
            status = await self.fetch_json(f"{router.url}/cluster/status")
            if status is None:
                return {"router": f"{router.name} does not answer"}
            unavailable |= find_unavailable_workers(status, stats)
            rows = {row["name"]: row for row in status["workers"]}
            for worker in workers:
                if worker.name not in unavailable and not problems.get(worker.name):
                    problems[worker.name] = _describe_problem_in_status_row(worker, rows[worker.name])
        if self.store is not None and self.store.name not in excluded_names:
            problems[self.store.name] = await self._describe_store_problem(
                [worker for worker in workers if worker.name not in unavailable]
            )
        unavailable |= {name: problem for name, problem in problems.items() if problem}
        for outage in (outage for router in self.routers for outage in router.outages[-1:]):
            if not unavailable and len(outage) == 1 and outage[0] < started_at:
                outage.append(asyncio.get_running_loop().time())
        return unavailable

    async def _fetch_stats_by_worker(self, processes: Sequence[ChaosProcess]) -> dict[str, Any]:
        replies = await asyncio.gather(*(self.fetch_json(f"{worker.url}/stats") for worker in processes))
        return {worker.name: stats for worker, stats in zip(processes, replies, strict=True)}

    async def _describe_store_problem(self, workers: Sequence[ChaosProcess]) -> str:
        assert self.store is not None
        if not self.store.is_running:
            return "the store is not running"
        unused_by = [
            worker.name
            for worker in workers
            if STORE_READY_PATTERN.search(await self._fetch_metrics_text(worker)) is None
        ]
        return f"the store is not used by {', '.join(unused_by)}" if unused_by else ""

    async def is_ready(self, process: ChaosProcess) -> bool:
        health = await self.fetch_json(f"{process.url}/health/ready")
        return bool(health) and health["status"] == "ready"

    def was_router_degraded_since(self, since: float) -> bool:
        """Whether at any time since `since` the only router was down, or not all workers had registered with it.

        Return False if there are several routers: then the failure of one must not cause errors."""
        outages = self.routers[0].outages if not self.has_several_routers else []
        return any(len(outage) == 1 or outage[1] >= since for outage in outages)

    async def wait_until_healthy(self) -> str:
        """Wait until the cluster is healthy, and return "".

        If it is not healthy after `RESTART_TIMEOUT_S`, return the first problem that remains."""
        return await wait_until_no_problem(self.describe_first_problem, RESTART_TIMEOUT_S)

    async def describe_held_resources(self) -> str:
        """Return which requests, leases or KV blocks the cluster still holds while no client sends requests.

        Return "" if it holds none."""
        stats = await self._fetch_stats_by_worker(self.workers)
        held = [
            describe_held_resources(await self.fetch_json(f"{router.url}/cluster/status"), stats)
            for router in self.routers
        ]
        return next(filter(None, held), "")

    async def wait_until_idle(self) -> str:
        return await wait_until_no_problem(self.describe_held_resources, IDLE_TIMEOUT_S)

    async def count_detected_faults(self, counter_name_part: str) -> Counter[str]:
        """Return the workers' counters of detected faults, by worker process and counter.

        A counter whose name and labels do not contain `counter_name_part` is returned as 0."""
        counts: Counter[str] = Counter()
        for worker in self.workers:
            for name, count in FAULT_COUNTER_PATTERN.findall(await self._fetch_metrics_text(worker)):
                counts[f"{worker.incarnation} {name}"] += int(float(count)) if counter_name_part in name else 0
        return counts

    async def _fetch_metrics_text(self, process: ChaosProcess) -> str:
        """Return the text of the worker's /metrics, or "" if the worker does not answer."""
        with contextlib.suppress(UpstreamFailed):
            headers = {CLUSTER_KEY_HEADER: self._cluster_key}
            return (await self.pool.fetch("GET", f"{process.url}/metrics", headers, timeout_s=5.0)).body.decode()
        return ""


def _describe_problem_in_status_row(process: ChaosProcess, status_row: dict[str, Any]) -> str:
    """Return what is wrong in the worker's row of the router's /cluster/status, or ""."""
    if status_row["incarnation"] != process.incarnation:
        return f"the router knows an older process of {process.name}: {status_row['incarnation']}"
    return (
        f"the circuit breaker of {process.name} is {status_row['breaker']}" if status_row["breaker"] != "closed" else ""
    )
