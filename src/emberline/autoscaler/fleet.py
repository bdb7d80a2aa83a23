"""WorkerFleet: the interface of adapters that start and stop workers, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from emberline.core.errors import EmberlineError

NAME_PREFIX = "auto"  # start of the names of workers that an autoscaler started


class FleetError(EmberlineError):
    """Workers could not be listed, started or stopped; the next attempt may succeed."""

    status = 503
    code = "fleet_unavailable"


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker that the fleet has started and that has not ended."""

    name: str  # name under which it registers with the router
    role: str
    is_stopping: bool = False
    removal_rank: int = 0  # the fleet can remove the workers with the highest rank only
    is_placeholder: bool = False  # stands for a worker that was ordered and has no name yet
    age_s: float | None = None  # seconds since its process started; None if names are not used again


class WorkerFleet(Protocol):
    """Starts and stops workers. The workers outlive the autoscaler: a new one finds them by `list_workers`."""

    async def list_workers(self) -> Sequence[FleetWorker]:
        """Return all workers of the fleet that have not ended. Raises FleetError."""
        ...

    async def start_workers(self, role: str, count: int) -> None:
        """Start workers; return before they are ready. Raises FleetError."""
        ...

    async def stop_worker(self, name: str) -> None:
        """Ask a drained worker to end, and return before it has ended. Raises FleetError."""
        ...

    async def replace_worker(self, name: str) -> bool:
        """End a worker that hangs, and return whether the fleet replaces it with a new one. Raises FleetError."""
        ...

    async def close(self, *, stop_workers: bool) -> None:
        """Release the fleet's resources. With `stop_workers`, stop its workers first."""
        ...
