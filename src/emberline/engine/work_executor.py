"""WorkExecutor: computes the logits of a step on the CPU with a model, its KV cache and its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from emberline.core.plan import BlockCopy, WorkItem
from emberline.engine.batch import build_forward_batch
from emberline.engine.step_columns import StepColumns
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.tiers.copier import HostBlockCopier
from emberline.models.forward import ForwardBatch, HiddenCapture


class ForwardModel(Protocol):
    """A model, or a part of one whose other parts are on other ranks."""

    def forward(self, batch: ForwardBatch) -> Tensor: ...


class StepExecutor(Protocol):
    """Computes the work of steps: in this process, or together with other ranks."""

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Copy blocks of the KV cache to host buffers, then others from host buffers, before the next `compute`."""
        ...

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks of the KV cache with zeros, before the next `compute`."""
        ...

    def compute(self, work: Sequence[WorkItem], capture: HiddenCapture | None = None) -> Tensor:
        """Return the logits of the rows that the work items ask for, and write the KV cache and the states."""
        ...


class WorkExecutor:
    def __init__(
        self,
        model: ForwardModel,
        cache: KVCache,
        groups: LayerGroups,
        states: StateCache | None = None,
        copier: HostBlockCopier | None = None,
    ) -> None:
        """`groups`: layers that share block tables. `states`: memory of recurrent layers, if there are any.

        `copier`: copies blocks; None: a HostBlockCopier that copies recurrent states too."""
        self._model, self._cache, self._groups, self._states = model, cache, groups, states
        self.copier = copier or HostBlockCopier(cache, states)

    def copy(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        self.copier.save(saves)
        self.copier.load(loads)

    def clear(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.copier.clear(blocks)

    @torch.inference_mode()
    def compute(
        self, work: Sequence[WorkItem], capture: HiddenCapture | None = None, columns: StepColumns | None = None
    ) -> Tensor:
        """Return the logits of the rows that the work items ask for, and write the KV cache and the states.

        `columns`: see `build_forward_batch`."""
        return self._model.forward(replace(self._prepare_batch(work, columns), capture=capture))

    def _prepare_batch(self, work: Sequence[WorkItem], columns: StepColumns | None = None) -> ForwardBatch:
        self._load_states(work)
        self._move_states(work)
        return self.build_batch(work, columns)

    def build_batch(self, work: Sequence[WorkItem], columns: StepColumns | None = None) -> ForwardBatch:
        return build_forward_batch(work, self._cache, self._groups, self._states, columns)

    def _load_states(self, work: Sequence[WorkItem]) -> None:
        for w in work:
            if self._states is not None and w.state is not None and w.state.load_from is not None:
                self._states.copy_slot(w.state.load_from, w.state.slot)

    def _move_states(self, work: Sequence[WorkItem]) -> None:
        """Copy states that came from another engine to their slots, and states for other engines to blocks."""
        for w in work:
            if w.state is not None:
                self.copier.read_states(w.state.slot, w.arrived_states)
                self.copier.write_states(w.state.slot, w.published_states)
