"""TensorPeak: measures the memory of live tensors, also of tensors on the meta device, which have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorPeak(TorchDispatchMode):
    """A context manager that records the most bytes of tensors that operations inside it made and that were alive.

    `counts`: which tensors; by default all."""

    def __init__(self, counts: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self.peak = 0
        self._counts = counts
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler, which takes seconds

    @property
    def live(self) -> int:
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_storage_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        _ = self.live  # forgets freed storages, whose addresses may be those of new ones
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and _storage_of(value) not in inputs and self._counts(value):
                storage = value.untyped_storage()
                self._made[_storage_of(value)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live)
        return result


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def measure_peak(work: Callable[[], object], counts: Callable[[Tensor], bool] = lambda tensor: True) -> int:
    """Return the most bytes of tensors that the work made and that were alive at the same time."""
    with torch.inference_mode(), TensorPeak(counts) as mode:
        work()
    return mode.peak
