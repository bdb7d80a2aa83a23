"""MovableExperts: the experts of a layer that may move between ranks, when each rank gets every rank's rows.

Every rank has memory (slots) for its own experts and for some more, in tensors whose addresses never change. It
computes the experts that are in its slots. The outputs of the ranks are summed exactly, so a row's bits depend neither
on the ranks that compute its experts nor on which copy of an expert is used. The device counts the rows of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.kernels import expert_ops
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import Mixture
from emberline.models.expert_placement import EMPTY_SLOT, Placement, list_slots, place_in_order
from emberline.models.expert_row_counts import ExpertRowCounts
from emberline.models.row_exchange import RowExchange


class MovableExperts:
    def __init__(self, experts: int, slots: ExpertSlots) -> None:
        """`experts`: the number of experts. `slots`: the tables of the layer's mixture of experts, on the device."""
        self._experts, self.slots = experts, slots
        self.expert_row_counts = ExpertRowCounts(experts, slots.groups)
        # Rows that each slot of all ranks has computed since the start.
        self.row_counts = torch.zeros(slots.count, dtype=torch.int64, device=slots.table.device)
        self._known_counts = np.zeros(slots.count, np.int64)
        self.set_placement(place_in_order(experts, slots.groups, slots.per_group))

    def set_placement(self, placement: Placement) -> None:
        """Use `placement` in later steps. The weights must already be in the slots that it assigns.

        All ranks must call this between the same two steps."""
        self.placement = placement
        self.slots.assign(list_slots(placement, self._experts))
        self.expert_row_counts.forget_groups()

    def add_outputs(self, x: Tensor, mixture: Mixture, exchange: RowExchange) -> Tensor:
        """Add the output of the mixture of experts to x, the rows of this rank, in place and return x."""
        found = expert_ops.sum_local_experts(exchange.gather(x), mixture)
        if exchange.counted is not None:
            per_row = found.slots.shape[1]
            counted = exchange.counted[:, None].expand(-1, per_row)
            self.row_counts.index_add_(0, found.slots.flatten(), counted.flatten())
        return x.add_(exchange.reduce_scatter(found.sums).to(x.dtype))

    def record_counts(self, counts: NDArray[np.int64]) -> None:
        """Record the rows that slots computed since the last call. `counts`: the values of `row_counts`."""
        rows, self._known_counts = (counts - self._known_counts).reshape(self.slots.groups, -1), counts
        placed = np.array(self.placement)
        by_expert = np.bincount(placed[placed != EMPTY_SLOT], rows[placed != EMPTY_SLOT], self._experts)
        self.expert_row_counts.add(by_expert.astype(np.int64), rows.sum(axis=1))


def read_row_counts(layers: Sequence[MovableExperts]) -> None:
    """Read the layers' row counts from the device and record them. All layers must have equally many slots."""
    counts = torch.stack([each.row_counts for each in layers]).cpu().numpy()
    for each, of_layer in zip(layers, counts, strict=True):
        each.record_counts(of_layer)
