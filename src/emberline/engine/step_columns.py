"""StepColumns: the fields of work items that change in every step, as arrays. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from emberline.core.plan import WorkItem


@dataclass(slots=True)
class StepColumns:
    starts: NDArray[np.int32]  # by item
    counts: NDArray[np.int32]  # by item: its number of tokens
    tokens: NDArray[np.int32]  # of all items
    samples: NDArray[np.bool_]  # by item

    @staticmethod
    def from_work(work: Sequence[WorkItem]) -> StepColumns:
        counts = np.array([len(w.tokens) for w in work], np.int32)
        starts = np.array([w.start for w in work], np.int32)
        tokens = np.fromiter((t for w in work for t in w.tokens), np.int32, int(counts.sum()))
        return StepColumns(starts, counts, tokens, np.array([w.samples for w in work], np.bool_))

    def fill_items(self, work: Sequence[WorkItem]) -> None:
        """Set `start`, `tokens` and `samples` of each work item from these arrays."""
        tokens, ends = self.tokens.tolist(), accumulate(self.counts.tolist())
        rows = zip(work, self.starts.tolist(), self.counts.tolist(), ends, self.samples.tolist(), strict=True)
        for item, start, count, end, samples in rows:
            item.start, item.tokens, item.samples = start, tokens[end - count : end], samples
