"""ExpertRunner: a runner whose ranks may have different experts. This module does not import torch."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from emberline.core.events import ExpertStats


@runtime_checkable
class ExpertRunner(Protocol):
    def expert_stats(self) -> ExpertStats | None:
        """Return how evenly the work of experts is spread over the ranks; None if this is not counted."""
        ...
