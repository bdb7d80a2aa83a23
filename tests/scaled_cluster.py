"""ScaledCluster: a router and a fleet in one, for tests of the autoscaler's loop in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from emberline.autoscaler.controller import Autoscaler
from emberline.autoscaler.fleet import FleetError, FleetWorker
from emberline.autoscaler.router_client import RouterUnavailable
from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings
from emberline.autoscaler.worker_probe import ProbeResult
from emberline.core.clock import ManualClock
from emberline.core.slo import LatencyTargets
from emberline.server.metrics import render_exposition

BOUNDS = (0.01, 0.1, 1.0)


def make_row(name: str, **changes: Any) -> dict[str, Any]:
    row = {"name": name, "incarnation": f"i-{name}", "role": "both", "health": "ready", "open": 0, "max_running": 8,
           "waiting": 0, "kv_usage": 0.0, "prompt_tokens": 0, "generated_tokens": 0, "prefill_tokens": 0,
           "decode_tokens": 0, "answered": 0, "transfer": None, "seconds_since_beat": 0.0,
           "open_by_other_routers": 0, "models": ["m", "minilm"], "embedders": ["minilm"]}  # fmt: skip
    return {**row, **changes}


class ScaledCluster:
    """Workers that start become ready at the next look, unless they fail."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.starting: list[FleetWorker] = []
        self.stopped: list[str] = []
        self.drains: list[tuple[str, bool]] = []
        self.started = 0
        self.starts_fail = self.router_fails = self.fleet_fails = False
        self.becomes_ready = True
        self.unstartable = set[str]()  # roles
        self.waiting = 0
        self.url, self.silent_count = "http://router", 0
        self.can_sleep = True
        self.waiting_model = "m"
        self.replaces_workers = False  # True: as Kubernetes does
        self.announced: set[str] = set()
        self.probes: dict[str, ProbeResult] = {}  # by URL
        self.probed: list[str] = []

    async def fetch_status(self) -> dict[str, Any]:
        if self.router_fails:
            raise RouterUnavailable("no router answers", hint="check it")
        latency = {"bounds_s": BOUNDS, "first_token": [0] * 4, "inter_token": [0] * 4}
        rows = list(self.rows.values())
        waiting = {"waiting_requests": self.waiting, "waiting_by_model": {self.waiting_model: self.waiting}}
        return {"workers": rows, **waiting, "refused": 0, "latency": latency}

    async def announce_models(self, names: set[str], seconds: float) -> None:
        assert seconds >= 30.0  # several intervals
        self.announced = names

    async def drain(self, name: str, *, on: bool = True) -> bool:
        self.drains.append((name, on))
        if name in self.rows:
            self.rows[name]["health"] = "draining" if on else "ready"
        return name in self.rows

    async def probe(self, url: str) -> ProbeResult:
        self.probed.append(url)
        return self.probes[url]

    async def set_asleep(self, name: str, *, on: bool = True) -> bool:
        self.rows[name]["asleep"] = on and self.can_sleep
        return self.can_sleep

    async def list_workers(self) -> list[FleetWorker]:
        if self.fleet_fails:
            raise FleetError("the fleet is away")
        managed = (FleetWorker(name, row["role"]) for name, row in self.rows.items() if name.startswith("auto-"))
        workers = [*self.starting, *managed]
        if self.starts_fail:
            self.starting = []
        elif self.becomes_ready:
            self.rows |= {worker.name: make_row(worker.name, role=worker.role) for worker in self.starting}
            self.starting = []
        return workers

    async def start_workers(self, role: str, count: int) -> None:
        if role in self.unstartable:
            raise FleetError(f"no GPU is free for the pool {role}")
        for _ in range(count):
            self.started += 1
            self.starting.append(FleetWorker(f"auto-{role}-{self.started}", role))

    async def stop_worker(self, name: str) -> None:
        self.stopped.append(name)
        self.rows.pop(name, None)
        self.starting = [worker for worker in self.starting if worker.name != name]

    async def replace_worker(self, name: str) -> bool:
        await self.stop_worker(name)
        if self.replaces_workers:
            self.starting.append(FleetWorker(name, "both"))
        return self.replaces_workers

    async def close(self, *, stop_workers: bool) -> None:
        self.rows = {} if stop_workers else self.rows


class Loop:
    def __init__(self, cluster: ScaledCluster, **changes: Any) -> None:
        pool = PoolSettings("both", changes.pop("min_workers", 1), 8, sleep=changes.pop("sleep", 0))
        pools = changes.pop("pools", (pool,))
        self.clock = ManualClock(100.0)
        models = changes.pop("models", ())
        self.settings = AutoscalerSettings(LatencyTargets(1.0, 0.05), pools, cool_down=20.0, **changes)
        self.autoscaler = Autoscaler(
            self.settings,
            cluster,
            cluster,
            self.clock,
            models,
            cluster.probe,  # type: ignore[arg-type]
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            asyncio.run(self.autoscaler.step())
            self.clock.advance(5.0)


def metric(loop: Loop, name: str) -> float:
    text = render_exposition(loop.autoscaler.metrics.metric_families())
    lines = [line for line in text.splitlines() if line.startswith(f"emberline:autoscaler_{name}")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0
