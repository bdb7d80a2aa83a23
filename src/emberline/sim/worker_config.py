"""SimWorkerConfig: the settings of a simulated worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.core.engine_config import SchedulerConfig
from emberline.sim.costmodel import CostModel, StepCosts

NEVER_S = 1e9  # a timeout that never passes


@dataclass(frozen=True, slots=True)
class SimWorkerConfig:
    kv_tokens: int = 131_072  # KV cache of each worker
    max_running: int = 64
    batch_tokens: int = 2048
    itl_target_ms: float | None = None  # the engine's option of this name
    cost: StepCosts = field(default_factory=CostModel)
    block_size: int = 16

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_running=self.max_running,
            max_batch_tokens=self.batch_tokens,
            max_context=self.kv_tokens,
            block_size=self.block_size,
            itl_target_ms=self.itl_target_ms,
            max_waiting=1 << 20,  # the router limits the queue
        )
