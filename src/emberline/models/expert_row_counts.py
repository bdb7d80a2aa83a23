"""ExpertRowCounts: counts the rows that select each expert of a layer. This module does not import torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RECENT_ROWS = 1 << 20  # after so many, the recent counts are halved, so that they follow the requests


class ExpertRowCounts:
    def __init__(self, experts: int, groups: int) -> None:
        """`groups`: number of groups of ranks among which the experts are divided."""
        self.recent = np.zeros(experts, np.int64)  # rows by expert; older rows count less
        self.recent_by_group = np.zeros(groups, np.int64)
        self.rows_by_group = np.zeros(groups, np.int64)  # since the engine started

    def record(self, experts: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
        """Count pairs of a row and an expert that it selects. `groups`: the group of ranks that computes each pair."""
        by_expert = np.bincount(experts.reshape(-1), minlength=len(self.recent))
        self.add(by_expert, np.bincount(groups.reshape(-1), minlength=len(self.rows_by_group)))

    def add(self, by_expert: NDArray[np.int64], by_group: NDArray[np.int64]) -> None:
        """Add counts of pairs of a row and an expert, by expert, and by the group of ranks that computes them."""
        self.rows_by_group += by_group
        self.recent_by_group += by_group
        self.recent += by_expert
        if self.recent_by_group.sum() > RECENT_ROWS:
            self.recent //= 2
            self.recent_by_group //= 2

    def forget_groups(self) -> None:
        """Set the recent rows of groups to 0, because experts have moved between groups."""
        self.recent_by_group[:] = 0


def measure_imbalance(counts: list[ExpertRowCounts]) -> float:
    """Return how many times longer experts take than if all groups of ranks had equally many rows.

    In each layer, all ranks wait for the group with the most rows. Only recent rows count. The result is the number of
    rows of that group, summed over the layers, divided by the same sum for the mean number of rows of a group. It is
    1.0 if there are no rows."""
    rows = np.array([load.recent_by_group for load in counts], np.float64)
    total = rows.sum()
    return float(rows.max(axis=1).sum() * rows.shape[1] / total) if total else 1.0
