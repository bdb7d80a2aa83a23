"""DataParallelExecutor: computes the steps of a rank that attends to requests of its own (data-parallel attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from emberline.core.plan import BlockCopy, WorkItem
from emberline.engine.step_columns import StepColumns
from emberline.engine.work_executor import ForwardModel, WorkExecutor
from emberline.kernels.comm.communicator import Communicator
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.tiers.copier import HostBlockCopier
from emberline.models.forward import ForwardBatch
from emberline.models.row_exchange import RowExchange


class DataParallelExecutor(WorkExecutor):
    def __init__(
        self,
        comm: Communicator,
        model: ForwardModel,
        cache: KVCache,
        groups: LayerGroups,
        states: StateCache | None,
        copier: HostBlockCopier,
    ) -> None:
        """`comm`: connects the ranks that have requests of their own. `cache`, `states`: hold this rank's requests."""
        super().__init__(model, cache, groups, states, copier)
        self._comm = comm

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Copy the blocks of this rank's requests. `saves`, `loads`: the copies of all ranks."""
        rank = self._comm.rank
        super().copy([each for each in saves if each.dp_rank == rank], [each for each in loads if each.dp_rank == rank])

    def _prepare_batch(self, work: Sequence[WorkItem], columns: StepColumns | None = None) -> ForwardBatch:
        """Return the batch of this rank's requests, with the number of rows of each rank.

        `work`: the work items of all ranks, sorted by rank."""
        if columns is not None:
            columns.fill_items(work)
        work_by_rank = [[w for w in work if w.dp_rank == rank] for rank in range(self._comm.size)]
        batch = super()._prepare_batch(work_by_rank[self._comm.rank])
        rows, logit_rows = (
            [sum(map(count, items)) for items in work_by_rank] for count in (_count_rows, _count_logit_rows)
        )
        return replace(
            batch,
            all_tokens=torch.tensor([token for w in work for token in w.tokens], dtype=torch.int64),
            exchange=RowExchange(self._comm, tuple(rows)),
            logit_exchange=RowExchange(self._comm, tuple(logit_rows)),
        )


def _count_rows(item: WorkItem) -> int:
    return len(item.tokens)


def _count_logit_rows(item: WorkItem) -> int:
    if item.prompt_logprobs:
        return len(item.tokens)
    return 1 + item.num_draft if item.samples else 0
