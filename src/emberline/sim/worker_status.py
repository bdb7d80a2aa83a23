"""SimWorkerStatus: a worker of a simulated cluster, its state, and the run that it computes now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from emberline.cluster.registration import Heartbeat
from emberline.core.config import Role
from emberline.sim.job import WorkerModel
from emberline.sim.worker_config import SimWorkerConfig

WorkerState = Literal["starting", "ready", "draining"]


@dataclass(slots=True)
class SimWorkerStatus:
    """A worker of the cluster, from its start to its end."""

    name: str
    role: Role
    config: SimWorkerConfig
    model: WorkerModel
    started_at: float
    state: WorkerState = "starting"
    run_number: int = 0  # number of its current or last run; an event for an earlier run is out of date
    run_end: float | None = None  # None: it is idle

    def heartbeat(self, paired: tuple[str, ...] = ()) -> Heartbeat:
        counters = self.model.counters()
        return Heartbeat(
            self.name,
            self.name,
            ready=self.state != "starting",
            running=counters.running,
            waiting=counters.waiting,
            loading=counters.loading,
            step=counters.steps,
            kv_usage=counters.kv_usage,
            busy_seconds=counters.busy_seconds,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            paired=paired,
        )
