"""ChaosProcess: a supervised process of the cluster, and the proxies of its connections."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from emberline.bench.processes import family, parent
from emberline.chaos.clock import MovedClock
from emberline.chaos.network import HERE, Link
from emberline.chaos.wire import Wire
from emberline.cluster.supervisor import Child
from emberline.core.config import Role


@dataclass(slots=True, eq=False)
class Place:
    name: str
    role: Role | None  # None: not a worker
    port: int
    child: Child
    clock: MovedClock
    host: str = HERE  # address on which it listens
    link: Link | None = None  # network link of all its traffic, with --links
    beats: Wire | None = None  # its heartbeats to the router
    requests: Wire | None = None  # the router's requests to it
    blocks: Wire | None = None  # other workers' fetches of its blocks
    disk: Path | None = None
    mapped: bool = False  # it fetches blocks through shared memory instead of a proxy
    incarnation: str | None = None  # of the process that registered last; None after a kill
    absences: list[list[float]] = field(default_factory=list)  # start and, once it is over, end of each outage
    _engine: int | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def runs(self) -> bool:
        return self.child.process is not None and self.child.process.returncode is None

    @property
    def pid(self) -> int:
        assert self.child.process is not None
        return self.child.process.pid

    @property
    def engine(self) -> int | None:
        """The pid of its engine process, or None.

        Finding it is slow, so the last result is reused while that process is still its child."""
        if self._engine is None or parent(self._engine) != self.pid:
            self._engine = family(self.pid).get("engine.process")
        return self._engine

    def signal(self, number: signal.Signals, *, engine: bool = False, both: bool = False) -> None:
        pids = [self.engine] if engine else [self.pid, self.engine] if both else [self.pid]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wires(self) -> list[Wire]:
        return [wire for wire in (self.beats, self.requests, self.blocks) if wire is not None]
