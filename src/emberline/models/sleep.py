"""Sleep: weights leave the device for pinned host memory and come back into the same Tensor objects.

A tensor has its values again after `wake`, but perhaps at another address. Whatever keeps raw addresses (captured CUDA
graphs, tensor maps, pointers read once) must be dropped before and made again after, unless `wake` says that nothing
moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from emberline.models.pinned import host_bytes, pin, unpin


@dataclass(frozen=True, slots=True)
class _Slept:
    storage: UntypedStorage
    address: int
    copy: Tensor  # uint8, on the host


class Sleep:
    """Memory that was given back, with what was in it. Use it once."""

    def __init__(self, slept: list[_Slept]) -> None:
        self._slept = slept

    @property
    def nbytes(self) -> int:
        return sum(one.copy.nbytes for one in self._slept)

    def wake(self) -> bool:
        """Everything is back when it returns. True: at the addresses of before. If memory runs out, what came back
        stays and it can be called again."""
        waking = [one for one in self._slept if one.storage.nbytes() == 0]
        for one in waking:  # each at once, so that a storage with memory always has its values
            one.storage.resize_(one.copy.nbytes)
            _bytes_of(one.storage).copy_(one.copy, non_blocking=True)
        _synchronize(one.storage for one in waking)
        same = all(one.storage.data_ptr() == one.address for one in self._slept)
        for one in self._slept:
            if one.storage.device.type == "cuda":
                unpin(one.copy)
        self._slept = []
        return same


def sleep(tensors: Iterable[Tensor]) -> Sleep:
    """Tensors that share memory are one copy. Nothing is freed before all is copied. No work may be queued that still
    uses them; views that are not listed lose their values too."""
    storages = {storage.data_ptr(): storage for t in tensors if (storage := t.untyped_storage()).nbytes()}
    slept = [_Slept(storage, address, host_bytes(storage.nbytes())) for address, storage in storages.items()]
    pinned: list[Tensor] = []
    try:
        for one in slept:
            if one.storage.device.type == "cuda":
                pin(one.copy)
                pinned.append(one.copy)
            one.copy.copy_(_bytes_of(one.storage), non_blocking=True)
        _synchronize(storages.values())
    except BaseException:
        _synchronize(storages.values())
        for copy in pinned:
            unpin(copy)
        raise
    for one in slept:
        one.storage.resize_(0)
    if pinned:
        torch.cuda.empty_cache()
    return Sleep(slept)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
