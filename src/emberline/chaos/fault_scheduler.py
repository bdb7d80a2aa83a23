"""FaultScheduler: decides which fault may be injected next, given the unavailable processes and the active faults.

The faults never make all workers unavailable at the same time."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from emberline.chaos.chaos_process import ChaosProcess
from emberline.chaos.faults import Fault
from emberline.chaos.request_progress import RequestStage


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    fault: Fault
    stage: RequestStage
    answering_worker: ChaosProcess  # the worker that should answer
    claimed: tuple[str, ...]  # processes and counter that no other fault may use meanwhile


class FaultScheduler:
    def __init__(self, workers: Sequence[ChaosProcess], rng: random.Random) -> None:
        self._workers = workers
        self._rng = rng
        self.pending: list[tuple[Fault, RequestStage]] = []
        self.active_claims: dict[str, Fault] = {}  # claimed process or counter, and the fault that claims it

    def next_fault(self, unavailable_names: Collection[str]) -> ScheduledFault | None:
        """Return the first pending fault that may be injected now. The fault counts as active until `finish_fault`."""
        for i, (fault, stage) in enumerate(self.pending):
            if (scheduled := self._schedule_if_possible(fault, stage, unavailable_names)) is not None:
                del self.pending[i]
                self.active_claims |= dict.fromkeys(scheduled.claimed, fault)
                return scheduled
        return None

    def finish_fault(self, scheduled_fault: ScheduledFault) -> None:
        for claim in scheduled_fault.claimed:
            del self.active_claims[claim]

    def _schedule_if_possible(
        self, fault: Fault, stage: RequestStage, unavailable_names: Collection[str]
    ) -> ScheduledFault | None:
        unavailable_names = {
            *unavailable_names,
            *(name for name, other in self.active_claims.items() if not other.keeps_workers_available),
        }
        answering_workers = [
            worker for worker in self._workers_with_role("decode") if worker.name not in unavailable_names
        ]
        if "router" in unavailable_names or (
            fault.target == "router" and not fault.keeps_workers_available and {*unavailable_names, *self.active_claims}
        ):
            return None
        if stage is RequestStage.TRANSFER and any(
            worker.name in unavailable_names for worker in self._workers_with_role("prefill")
        ):
            return None
        candidates = [
            worker for worker in answering_workers if not (fault.needs_tcp_transfer and worker.uses_shared_memory)
        ]
        self._rng.shuffle(candidates)
        for candidate in candidates:
            claims = self._names_of_affected_processes(fault, candidate)
            remaining = (
                {worker.name for worker in self._workers}
                - unavailable_names
                - ({*claims} if not fault.keeps_workers_available else set())
            )
            if remaining and not {*unavailable_names, *self.active_claims} & {*claims}:
                return ScheduledFault(fault, stage, candidate, claims)
        return None

    def _names_of_affected_processes(self, fault: Fault, answering_worker: ChaosProcess) -> tuple[str, ...]:
        match fault.target:
            case "decode":
                processes = [answering_worker.name]
            case "prefill":
                processes = [worker.name for worker in self._workers_with_role("prefill")]
            case other:
                processes = [other]
        return (*processes, fault.counter_label) if fault.counter_label else tuple(processes)

    def _workers_with_role(self, role: str) -> list[ChaosProcess]:
        return [worker for worker in self._workers if worker.role == role]


def draw_faults(faults: Sequence[Fault], rng: random.Random) -> Iterator[tuple[Fault, RequestStage]]:
    """Yield pairs of a fault and the request stage at which to inject it, forever.

    Each fault comes once, in random order; after that, faults are drawn at random according to their weights. Each time
    that a fault is drawn again, it is paired with the next of its stages."""
    order = list(faults)
    rng.shuffle(order)
    stage_index = {fault.name: rng.randrange(len(fault.stages)) for fault in faults}
    while True:
        fault = order.pop() if order else rng.choices(faults, [fault.weight for fault in faults])[0]
        stage_index[fault.name] += 1
        yield fault, fault.stages[stage_index[fault.name] % len(fault.stages)]
