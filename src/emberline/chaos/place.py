"""Place: a process that is started again under the same name, and the ways to it."""

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
    role: Role | None  # None: it is no worker
    port: int
    child: Child
    clock: MovedClock
    host: str = HERE  # where it listens
    link: Link | None = None  # all that it has to do with others goes through this, if it is there
    beats: Wire | None = None  # to the router
    requests: Wire | None = None  # from it
    blocks: Wire | None = None  # from workers that want its blocks
    disk: Path | None = None
    mapped: bool = False  # it takes blocks through shared memory; others do through wires
    incarnation: str | None = None  # of the process that registered last; None: it was killed since
    absences: list[list[float]] = field(default_factory=list)  # since when it was dead, and until when, if it is back
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
        """Its child. Looking for it takes a while: the one found last is, if it is still there."""
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
