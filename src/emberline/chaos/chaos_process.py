"""ChaosProcess: one process of a ChaosCluster, and the proxies through which the other processes connect to it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from emberline.bench.processes import find_parent_pid, find_process_tree
from emberline.chaos.clock import ShiftedClock
from emberline.chaos.fault_proxy import FaultProxy
from emberline.chaos.network import LOOPBACK_ADDRESS, NetworkLink
from emberline.cluster.supervisor import SupervisedProcess
from emberline.core.config import Role


@dataclass(slots=True, eq=False)
class ChaosProcess:
    name: str
    role: Role | None  # None: not a worker
    port: int
    child: SupervisedProcess
    clock: ShiftedClock
    host: str = LOOPBACK_ADDRESS  # address on which it listens
    link: NetworkLink | None = None  # network link of all its traffic, with --links
    heartbeats: list[FaultProxy] = field(default_factory=list)  # its heartbeats to each router
    requests: FaultProxy | None = None  # the router's requests to it
    blocks: FaultProxy | None = None  # other workers' fetches of its blocks
    disk: Path | None = None
    uses_shared_memory: bool = False  # it fetches blocks through shared memory instead of a proxy
    incarnation: str | None = None  # of the process that registered last; None after a kill
    outages: list[list[float]] = field(default_factory=list)  # start and, once it is over, end of each outage
    _engine_pid: int | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.child.process is not None and self.child.process.returncode is None

    @property
    def pid(self) -> int:
        assert self.child.process is not None
        return self.child.process.pid

    @property
    def engine_pid(self) -> int | None:
        """The process id of the worker's engine process, or None if no engine runs.

        Finding the engine process is slow, so its id is cached for as long as that process exists."""
        if self._engine_pid is None or find_parent_pid(self._engine_pid) != self.pid:
            self._engine_pid = find_process_tree(self.pid).get("engine.process")
        return self._engine_pid

    def send_signal(
        self, signal_number: signal.Signals, *, engine_only: bool = False, include_engine: bool = False
    ) -> None:
        pids = [self.engine_pid] if engine_only else [self.pid, self.engine_pid] if include_engine else [self.pid]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def proxies(self) -> list[FaultProxy]:
        return [proxy for proxy in (*self.heartbeats, self.requests, self.blocks) if proxy is not None]
