"""ExpertDispatch: sends rows to the ranks that have their experts, and adds the outputs that come back.

Every rank knows which experts the rows of all ranks select, so it knows how many rows each rank sends. A row is sent
once to each rank that has one of its experts. Outputs come back for each pair of a row and an expert, and are added in
the order of the experts' numbers. So a row's bits depend neither on other rows nor on the rank that computed an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.kernels import expert_ops
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import Mixture, SelectedExperts
from emberline.models.expert_placement import Placement, list_slots, place_in_order
from emberline.models.expert_row_counts import ExpertRowCounts
from emberline.models.row_exchange import RowExchange
from emberline.models.shard import Shard


class ExpertDispatch:
    """Sends the rows of one layer to the ranks that have their experts."""

    def __init__(self, experts: int, groups: int, redundant: int, device: torch.device) -> None:
        """`groups`: number of groups of ranks. `redundant`: slots of each group for copies of experts.

        `device`: the device on which the rows are."""
        self._experts, per_group = experts, experts // groups + redundant
        self.expert_row_counts, self.slots = (
            ExpertRowCounts(experts, groups),
            ExpertSlots(experts, groups, per_group, device),
        )
        self.set_placement(place_in_order(experts, groups, per_group))

    def set_placement(self, placement: Placement) -> None:
        """Send rows to experts as in `placement` from now on. All ranks must call this before the same step."""
        self.placement = placement
        self.slots.assign(list_slots(placement, self._experts))
        self.expert_row_counts.forget_groups()

    @staticmethod
    def for_shard(shard: Shard, experts: int, device: torch.device) -> ExpertDispatch | None:
        """Return the dispatch of a rank, or None if `shard` does not send rows between ranks."""
        if not shard.dispatches_rows:
            return None
        return ExpertDispatch(experts, shard.expert_parts, shard.redundant_experts, device)

    def add_outputs(self, x: Tensor, mixture: Mixture, exchange: RowExchange) -> Tensor:
        """Add the output of the mixture of experts to x, the rows of this rank, in place and return x."""
        comm, rules = exchange.comm, mixture.routing
        selected = _select(x, mixture)
        numbers = exchange.gather(selected.numbers).long()
        slots = self.slots.choose(numbers)  # [rows of all ranks, experts per row]
        groups, ranks_per_group = slots // self.slots.per_group, comm.size // self.slots.groups
        self.expert_row_counts.record(numbers.cpu().numpy(), groups.cpu().numpy())
        group_of = [rank // ranks_per_group for rank in range(comm.size)]
        first = sum(exchange.counts[: comm.rank])
        own_groups, local_group = groups[first : first + exchange.num_local_rows], group_of[comm.rank]

        # Rows of this rank that go to each rank, and rows of each rank that come here.
        sent = [(own_groups == group).any(1).nonzero()[:, 0] for group in group_of]
        is_received = (groups == local_group).any(1)
        received_counts = [int(part.sum()) for part in is_received.split(exchange.counts)]
        received = comm.all_to_all(selected.normed[torch.cat(sent)], list(map(len, sent)), received_counts)

        # Pairs of a row and a choice that this rank computes, in the order of the rows.
        row, choice = (groups == local_group).nonzero(as_tuple=True)
        inputs = received[(is_received.cumsum(0) - 1)[row]]
        if rules.scales_inputs:
            inputs *= exchange.gather(selected.weights)[row, choice, None]
        outputs = inputs
        if len(row):
            local = slots[row, choice] - local_group * self.slots.per_group
            outputs = expert_ops.run_experts(inputs, local.int(), mixture)

        # The outputs go back to the ranks of their rows.
        computed_counts = [int((part == local_group).sum()) for part in groups.split(exchange.counts)]
        pairs = [(own_groups == group).flatten().nonzero()[:, 0] for group in group_of]
        parts = comm.all_to_all(outputs, computed_counts, list(map(len, pairs)))
        return _add(x, selected, mixture, _sum_parts(parts, pairs, x, rules.experts_per_row))


def _select(x: Tensor, mixture: Mixture) -> SelectedExperts:
    if len(x):
        return expert_ops.select_experts(x, mixture)
    nothing = x.new_empty(0, mixture.routing.experts_per_row, dtype=torch.float32)
    return SelectedExperts(x, nothing, nothing.int())


def _sum_parts(parts: Tensor, pairs: list[Tensor], x: Tensor, per_row: int) -> Tensor:
    """Return the outputs [rows, experts per row, hidden], from those that the ranks sent back.

    `parts`: the outputs of the first rank, then those of the second, and so on.
    `pairs`: for each rank, the indexes of its outputs among all pairs of a row and an expert. Ranks of one group each
    compute a part of the same outputs, so these parts are added, in the order of the ranks."""
    total = torch.zeros(len(x) * per_row, x.shape[1], dtype=torch.float32, device=x.device)
    for part, indexes in zip(parts.split(list(map(len, pairs))), pairs, strict=True):
        total[indexes] += part
    return total.to(x.dtype).view(len(x), per_row, x.shape[1])


def _add(x: Tensor, selected: SelectedExperts, mixture: Mixture, outputs: Tensor) -> Tensor:
    if mixture.shared is not None and len(x):
        expert_ops.add_shared_expert(x, selected.normed, mixture)
    for output, weight in zip(outputs.unbind(1), selected.weights.unbind(1), strict=True):
        x.add_(output if mixture.routing.scales_inputs else output * weight[:, None])
    return x
