"""PacedExecutor: makes every step take at least as long as a cost table says, to imitate slower hardware.

A cluster of such workers behaves like one of the table's hardware, although it computes a small model on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.plan import BlockCopy, WorkItem
from emberline.core.step_costs import StepCostTable

if TYPE_CHECKING:  # needs torch, and this module is tested without
    from torch import Tensor

    from emberline.engine.work_executor import StepExecutor
    from emberline.models.forward import HiddenCapture


class PacedExecutor:
    def __init__(
        self,
        executor: StepExecutor,
        costs: StepCostTable,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._executor, self._costs = executor, costs
        self._clock, self._sleep = clock, sleep

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        self._executor.copy(saves, loads)

    def clear(self, blocks: Sequence[int]) -> None:
        self._executor.clear(blocks)

    def compute(self, work: Sequence[WorkItem], capture: HiddenCapture | None = None) -> Tensor:
        ends = self._clock() + self._costs.estimate_work_seconds(work)
        logits = self._executor.compute(work, capture)
        if (left := ends - self._clock()) > 0:
            self._sleep(left)
        return logits


def pace_executor(executor: StepExecutor, step_costs: str | None) -> StepExecutor:
    """Return an executor whose steps take as long as the file `step_costs` says; None: the executor itself."""
    return executor if step_costs is None else PacedExecutor(executor, StepCostTable.load(Path(step_costs)))
