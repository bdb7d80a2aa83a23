"""ExpertSlots: which slot has the weights of which expert, if experts may move between ranks or have copies.

The tables are tensors on the device of the rows, and are changed in place, so that captured graphs read the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SCATTER, SCATTER_SHIFT = 0x9E3779B1, 16  # 2 ** 32 divided by the golden ratio: close numbers get distant products


class ExpertSlots:
    """The slots of each expert. A slot holds the weights of one expert; an expert may be in several slots.

    This is no dataclass: when a model sleeps, the memory of all tensors that are found in dataclasses is freed, and
    these small tables are needed meanwhile."""

    def __init__(self, experts: int, groups: int, per_group: int, device: torch.device, local_group: int = 0) -> None:
        """`experts`: number of experts. `groups`: number of groups of ranks; each rank of a group has a part of each of
        the group's experts. `per_group`: slots of a group; group g has the slots from g * per_group on. `local_group`:
        the group of this rank."""
        self.groups, self.per_group = groups, per_group
        self.local_slots = range(local_group * per_group, (local_group + 1) * per_group)
        # Slots of each expert, as many as it has copies, then zeros: [experts, groups].
        self.table = torch.zeros(experts, groups, dtype=torch.int64, device=device)
        self.copies = torch.ones(experts, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        """The number of slots of all groups."""
        return self.groups * self.per_group

    def assign(self, slots: Sequence[Sequence[int]]) -> None:
        """Set the slots in which later steps find the experts. `slots`: one or more for each expert."""
        rows = [[*each, *[0] * (self.groups - len(each))] for each in slots]
        self.table.copy_(torch.tensor(rows))
        self.copies.copy_(torch.tensor(list(map(len, slots))))

    def choose(self, experts: Tensor) -> Tensor:
        """Return the slot that computes each expert of each row. `experts`: [rows, experts per row].

        A hash of the row's index plus the index of the expert selects one of the expert's copies. Without the hash,
        copies would be used unevenly: in padded steps, all rows of requests may be at multiples of 8, and select the
        same copy."""
        row = torch.arange(len(experts), device=experts.device)[:, None] * SCATTER >> SCATTER_SHIFT
        return self.table[experts, (row + experts) % self.copies[experts]]
