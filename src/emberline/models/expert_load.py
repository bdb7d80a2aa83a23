"""ExpertLoad: counts the rows that select each expert of a layer. This module does not import torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RECENT_ROWS = 1 << 20  # after so many, the recent counts are halved, so that they follow the requests


class ExpertLoad:
    def __init__(self, experts: int, groups: int) -> None:
        """`groups`: of ranks, among which the experts are divided."""
        self.recent = np.zeros(experts, np.int64)  # rows by expert, of which older ones count less
        self.recent_by_group = np.zeros(groups, np.int64)
        self.rows_by_group = np.zeros(groups, np.int64)  # since the engine started

    def record(self, experts: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
        """Count pairs of a row and an expert. `groups`: that computes each pair."""
        by_expert = np.bincount(experts.reshape(-1), minlength=len(self.recent))
        self.add(by_expert, np.bincount(groups.reshape(-1), minlength=len(self.rows_by_group)))

    def add(self, by_expert: NDArray[np.int64], by_group: NDArray[np.int64]) -> None:
        """Add numbers of such pairs."""
        self.rows_by_group += by_group
        self.recent_by_group += by_group
        self.recent += by_expert
        if self.recent_by_group.sum() > RECENT_ROWS:
            self.recent //= 2
            self.recent_by_group //= 2

    def forget_groups(self) -> None:
        """Count recent rows of groups anew, because experts have moved."""
        self.recent_by_group[:] = 0


def measure_imbalance(loads: list[ExpertLoad]) -> float:
    """Return how much longer ranks compute experts because their recent rows differ; 1: all have as many.

    In each layer all ranks wait for the one with the most rows: its rows are divided by the mean of the ranks."""
    rows = np.array([load.recent_by_group for load in loads], np.float64)
    total = rows.sum()
    return float(rows.max(axis=1).sum() * rows.shape[1] / total) if total else 1.0
