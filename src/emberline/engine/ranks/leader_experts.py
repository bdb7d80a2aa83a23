"""LeaderExperts: how evenly the ranks of an engine compute experts, and the moves of experts that even it out."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from emberline.core.clock import Clock, SystemClock
from emberline.core.events import ExpertStats
from emberline.engine.ranks.expert_balancer import ExpertBalancer
from emberline.engine.ranks.expert_moves import ExpertMoves
from emberline.engine.ranks.layout import Layout
from emberline.models.decoder import DecoderModel
from emberline.models.expert_load import measure_imbalance
from emberline.models.expert_placement import moved_experts

log = logging.getLogger("emberline.engine")


class LeaderExperts:
    def __init__(self, model: DecoderModel, layout: Layout, clock: Clock | None = None) -> None:
        """`model`: the leader's part."""
        networks = model.dispatching_layers
        self._dispatches = {layer: each.dispatch for layer, each in networks.items() if each.dispatch is not None}
        self._ranks_per_group, self._moved = layout.tp // layout.ep, 0
        self.balancer: ExpertBalancer | None = None  # None: experts stay where they are
        if layout.redundant_experts:
            self.balancer = ExpertBalancer(self._dispatches, clock or SystemClock())

    def stats(self) -> ExpertStats | None:
        """Return the statistics; None: no rows are sent to experts of other ranks."""
        if not self._dispatches:
            return None
        loads = [each.load for each in self._dispatches.values()]
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
        layer, placement = found
        moved = moved_experts(self._dispatches[layer].placement, placement)
        if move({layer: placement}):
            self._moved += len(moved)
            log.info("Experts moved: layer=%d loaded=%d", layer, len(moved))
        else:
            self.balancer.stop()
        return True
