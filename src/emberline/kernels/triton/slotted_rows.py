"""select_slots: selects the experts of each row if experts may move between ranks, and sorts the rows by slot.

A slot is memory for the weights of one expert (`kernels/expert_slots.py`). As in `routing.py`, launches depend on the
number of rows only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import Routing
from emberline.kernels.triton.routing import SortedRows, route_to_all, select_local_tiles

UNUSED_TILE_ROWS = 16  # `route_to_all` needs a tile size, but `select_slots` ignores the tiles that it returns


@dataclass(frozen=True, slots=True)
class SlottedRows:
    """The experts that each row selects, given as the slots that compute them."""

    weights: Tensor  # float32 [rows * experts per row]
    slots: Tensor  # int64 [rows, experts per row]
    table: ExpertSlots

    def sort(self, logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool = False) -> SortedRows:
        """Return the rows sorted into tiles of this rank's slots, as `route_rows` does with experts.

        This reuses the kernels that route rows to experts: the slots of a row get the scores n, n - 1, .. 1 as logits,
        so that they are selected in the order of the row's experts and match their weights."""
        rows, top = self.slots.shape
        assert rows == len(logits) and top == rules.experts_per_row
        order = torch.arange(top, 0, -1, dtype=torch.float32, device=logits.device)
        marks = torch.zeros(rows, self.table.count, dtype=torch.float32, device=logits.device)
        marks.scatter_(1, self.slots, order.expand(rows, top))
        found = route_to_all(marks, Routing(top, scores="sigmoid"), tile_rows, pdl=pdl)
        return select_local_tiles(replace(found, weights=self.weights), self.table.local_slots)


def select_slots(logits: Tensor, rules: Routing, table: ExpertSlots, *, pdl: bool = False) -> SlottedRows:
    """Select the experts of each row, and return the slots that compute them.

    `logits`: as for `route_rows`."""
    found = route_to_all(logits, rules, UNUSED_TILE_ROWS, pdl=pdl)
    slots = table.choose(found.chosen.view(len(logits), -1).long())
    return SlottedRows(found.weights, slots, table)
