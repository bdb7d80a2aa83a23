"""`emberline bench node-faults`: an engine on two nodes, which are network namespaces, with faults of the second node.

The link between the nodes is cut, the process of the second node gets SIGKILL or SIGSTOP, or one of its ranks is
killed. Then every open stream must end, the node must join again, and the engine must answer with the same tokens as
one rank. The bench needs root.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from emberline.bench.rank_faults import (
    MODEL,
    FaultCounts,
    RankFaultSettings,
    check_stream,
    engine_settings,
    find_children,
    generate,
    report_faults,
    wait_for_recovery,
    wait_until_gone,
)
from emberline.bench.rate_limited_network import NEAR, NamespacesUnavailable, RemoteNamespace, rate_limited_network
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineUnavailable
from emberline.core.freeport import free_port
from emberline.core.keys import CLUSTER_KEY_VARIABLE, make_key_environment
from emberline.engine.async_engine import AsyncEngine
from emberline.hub.source import resolve_model

LINK_GBIT = 10.0
FAULT_NAMES = ("cut link", "killed node", "stopped node", "killed rank")
GOODBYE_TIMEOUT_S = 10.0  # for the second node to end after the engine
POLL_INTERVAL_S = 0.05


def bench(settings: RankFaultSettings, log: Callable[[str], None]) -> BenchReport:
    """Run the benchmark. Raises EngineUnavailable if network namespaces cannot be created."""
    os.environ["EMBERLINE_CLUSTER_KEY"] = key = secrets.token_hex(16)  # for the engine process
    try:
        with rate_limited_network(LINK_GBIT) as network:
            faults = NodeFaults(settings, network, key, log)
            asyncio.run(faults.run())
    except NamespacesUnavailable as error:
        raise EngineUnavailable(f"network namespaces are not available: {error}", hint="run as root") from error
    report = report_faults("node-faults", asdict(settings), faults.counts)
    for name, seconds in faults.detection_s.items():
        report.add(f"{name.replace(' ', '_')}_streams_end_s", seconds, "s")
    return report


class NodeFaults:
    def __init__(
        self, settings: RankFaultSettings, network: RemoteNamespace, key: str, log: Callable[[str], None]
    ) -> None:
        self._settings, self._network, self._key, self._log = settings, network, key, log
        self._model = str(resolve_model(settings.model))
        self._nodes = {"nodes": 2, "master": f"{NEAR}:{free_port(NEAR)}"}
        self.counts = FaultCounts()
        self.detection_s: dict[str, list[float]] = {}  # by fault, from the fault to the end of all streams

    async def run(self) -> None:
        """Inject the faults, each into an engine of its own, because an engine pauses longer before each restart."""
        whole = engine_settings(self._settings) | {"tp": 1, "pp": 1}
        engine = AsyncEngine({MODEL: EngineConfig.build(self._model, **whole)}, TimeSharingConfig())
        await engine.start()
        prompts = range(self._settings.streams)
        self._expected = [await generate(engine, f"expected-{i}", i, self._settings.tokens) for i in prompts]
        await engine.stop()
        for index in range(self._settings.faults):
            await self._run_engine(index, FAULT_NAMES[index % len(FAULT_NAMES)])

    async def _run_engine(self, index: int, fault: str) -> None:
        config = EngineConfig.build(self._model, **engine_settings(self._settings), **self._nodes)
        engine, self._node = AsyncEngine({MODEL: config}, TimeSharingConfig()), self._start_node()
        try:
            await engine.start()
            await self._inject_fault(engine, index, fault)
        finally:
            await engine.stop()
            with suppress(subprocess.TimeoutExpired):
                self._node.wait(GOODBYE_TIMEOUT_S)
            self.counts.leaked += self._node.poll() is None
            self._node.kill()
            self._node.wait()

    def _start_node(self) -> subprocess.Popen[bytes]:
        options = engine_settings(self._settings) | self._nodes | {"node_rank": 1}
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "emberline.cli", "serve", self._model, *words, "--log-level", "warning"]
        environment = {**os.environ, **make_key_environment([self._key], CLUSTER_KEY_VARIABLE)}
        return subprocess.Popen(["ip", "netns", "exec", self._network.name, *command], env=environment)

    async def _inject_fault(self, engine: AsyncEngine, index: int, fault: str) -> None:
        settings, counts, restarts = self._settings, self.counts, engine.restarts
        assert engine.pid is not None
        pids = [engine.pid, *find_children(engine.pid), *find_children(self._node.pid)]
        streams = [
            asyncio.create_task(check_stream(engine, f"{index}-{i}", i, self._expected[i], settings, counts))
            for i in range(settings.streams)
        ]
        await asyncio.sleep(0.2)
        began, broken = time.monotonic(), counts.broken
        self._break(fault)
        await asyncio.gather(*streams)
        if counts.broken > broken:
            self.detection_s.setdefault(fault, []).append(time.monotonic() - began)
        while engine.restarts == restarts and time.monotonic() - began < 2 * settings.rank_timeout + 5:
            await asyncio.sleep(POLL_INTERVAL_S)
        left = await wait_until_gone(pids)  # before the node is repaired
        self._repair(fault)
        recovery_s = await wait_for_recovery(engine, index, self._expected[0], counts, began)
        counts.recovery_s.append(recovery_s)
        counts.leaked += left
        counts.faults += 1
        self._log(
            f"fault {index + 1}: {fault}, streams ended with an error: {counts.broken - broken},"
            f" recovered in {recovery_s:.1f} s, {left} processes left"
        )

    def _break(self, fault: str) -> None:
        if fault == "cut link":
            self._network.set_link("down")
        elif fault == "killed rank":
            os.kill(find_children(self._node.pid)[0], signal.SIGKILL)
        else:
            self._node.send_signal(signal.SIGSTOP if fault == "stopped node" else signal.SIGKILL)

    def _repair(self, fault: str) -> None:
        if fault == "cut link":
            self._network.set_link("up")
        elif fault == "stopped node":
            self._node.send_signal(signal.SIGCONT)
        elif fault == "killed node":
            self._node.wait()
            self._node = self._start_node()
