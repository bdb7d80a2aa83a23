"""ExpertBalancer: decides from the observed load when experts move to other ranks.

This module does not import torch. The caller passes the clock, so that tests can control the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from emberline.core.clock import Clock
from emberline.models.expert_placement import Placement, group_loads, place_experts
from emberline.models.expert_row_counts import ExpertRowCounts, measure_imbalance

CHECK_INTERVAL_S = 30.0  # between two times at which experts may move
MIN_IMBALANCE = 1.1  # below this, experts stay where they are
MIN_ROWS_PER_EXPERT = 16  # average over the experts of a layer; fewer recent rows say little about the next ones
MIN_LOAD_DECREASE = 0.05  # fraction by which the load of the busiest ranks of a layer must fall for experts to move


class PlacedExperts(Protocol):
    """The experts of a layer, which are divided among groups of ranks.

    ExpertDispatch and MovableExperts implement this protocol."""

    placement: Placement
    expert_row_counts: ExpertRowCounts


class ExpertBalancer:
    def __init__(
        self, layers: Mapping[int, PlacedExperts], clock: Clock, update_loads: Callable[[], None] = lambda: None
    ) -> None:
        """`layers`: by index, the layers whose experts may move.

        `update_loads`: adds the rows (tokens) that experts have computed since its last call to the loads of these
        layers."""
        self._layers, self._clock, self._update_loads = layers, clock, update_loads
        self._next_check = clock.now() + CHECK_INTERVAL_S
        self._unchecked: list[int] = []  # layers whose experts may move now

    @property
    def is_due(self) -> bool:
        """Whether experts of some layer may have to move."""
        if not self._unchecked and self._clock.now() >= self._next_check:
            self._next_check = self._clock.now() + CHECK_INTERVAL_S
            self._update_loads()
            loads = [each.expert_row_counts for each in self._layers.values()]
            is_known = all(load.recent.sum() >= MIN_ROWS_PER_EXPERT * len(load.recent) for load in loads)
            if is_known and measure_imbalance(loads) >= MIN_IMBALANCE:
                self._unchecked = list(self._layers)
        return bool(self._unchecked)

    def choose_move(self) -> tuple[int, Placement] | None:
        """Check the next layer. Return the layer and its new placement; None: its experts stay where they are."""
        layer = self._unchecked.pop(0)
        experts = self._layers[layer]
        loads = experts.expert_row_counts.recent.tolist()
        placement = place_experts(loads, experts.placement)
        largest, before = (max(group_loads(loads, each)) for each in (placement, experts.placement))
        return (layer, placement) if largest <= before * (1 - MIN_LOAD_DECREASE) else None

    def stop(self) -> None:
        """Never move experts again, because a rank could not load one."""
        self._unchecked, self._next_check = [], float("inf")
