"""LeaderExperts: how evenly the ranks of an engine compute experts, and the moves of experts that even it out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from emberline.core.clock import Clock, SystemClock
from emberline.core.events import ExpertStats
from emberline.engine.ranks.expert_balancer import ExpertBalancer, PlacedExperts
from emberline.engine.ranks.expert_moves import ExpertMoves
from emberline.engine.ranks.layout import Layout
from emberline.models.expert_placement import list_moved_experts
from emberline.models.expert_row_counts import measure_imbalance

UPDATE_INTERVAL_S = 1.0  # between two updates of the loads for statistics

log = logging.getLogger("emberline.engine")


class LeaderExperts:
    def __init__(
        self,
        layers: Mapping[int, PlacedExperts],
        layout: Layout,
        clock: Clock | None = None,
        update_loads: Callable[[], None] = lambda: None,
    ) -> None:
        """`layers`: by index, the layers whose experts are divided among groups of ranks.

        `update_loads`: adds the rows (tokens) that experts have computed since its last call to the loads of these
        layers."""
        self._layers, self._clock, self._update_loads = layers, clock or SystemClock(), update_loads
        self._ranks_per_group, self._moved, self._next_update = layout.tp // layout.ep, 0, 0.0
        self.balancer: ExpertBalancer | None = None  # None: experts stay where they are
        if layout.redundant_experts:
            self.balancer = ExpertBalancer(layers, self._clock, update_loads)

    @property
    def is_due(self) -> bool:
        """Whether experts of some layer may have to move."""
        return self.balancer is not None and self.balancer.is_due

    def stats(self) -> ExpertStats | None:
        """Return the statistics; None if the rows (tokens) of each expert are not counted."""
        if not self._layers:
            return None
        if (now := self._clock.now()) >= self._next_update:
            self._next_update = now + UPDATE_INTERVAL_S
            self._update_loads()
        loads = [each.expert_row_counts for each in self._layers.values()]
        by_group = np.sum([load.rows_by_group for load in loads], axis=0)
        rows = [int(rows) for rows in by_group for _ in range(self._ranks_per_group)]
        return ExpertStats(rows, measure_imbalance(loads), self._moved)

    def move_next(self, move: Callable[[ExpertMoves], bool]) -> bool:
        """Check one layer, and move its experts if that evens out the load; return False if no layer was left.

        `move`: lets all ranks load experts, and returns False if one of them could not."""
        if self.balancer is None or not self.balancer.is_due:
            return False
        if (found := self.balancer.choose_move()) is None:
            return True
        self._update_loads()  # before the move, because it counts by the present placement
        layer, placement = found
        moved = list_moved_experts(self._layers[layer].placement, placement)
        if move({layer: placement}):
            self._moved += len(moved)
            log.info("Experts moved: layer=%d loaded=%d", layer, len(moved))
        else:
            self.balancer.stop()
        return True
