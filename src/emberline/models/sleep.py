"""Sleep mode: frees the device memory of tensors and restores it later into the same Tensor objects.

The content of weights is kept in pinned host memory; scratch tensors are restored as zeros. If `wake` returns False,
some tensors have new addresses, and everything that holds raw addresses (captured CUDA graphs, tensor maps, saved
pointers) must be created again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor, UntypedStorage

from emberline.models.pinned import allocate_host_bytes, pin, unpin

T = TypeVar("T")


@dataclass(slots=True)
class _SleepingStorage:
    storage: UntypedStorage
    address: int  # when it last had memory
    size: int
    copy: Tensor | None  # content as uint8 on the host; None: restored as zeros


class SleepingMemory:
    """The freed device memory of some tensors, with a copy of its content in host memory."""

    def __init__(self, slept: list[_SleepingStorage]) -> None:
        self._slept = slept

    @property
    def nbytes(self) -> int:
        return sum(entry.size for entry in self._slept)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies in host memory."""
        return sum(entry.size for entry in self._slept if entry.copy is not None)

    def wake(self, *, keep_host_copies: bool = False) -> bool:
        """Restore all device memory and return whether every tensor has the same address as before.

        If device memory runs out, this raises; what was restored so far stays, and `wake` can be called again. With
        `keep_host_copies`, the host copies are kept for `sleep_again`.
        """
        waking = [entry for entry in self._slept if entry.storage.nbytes() == 0]
        for entry in waking:  # one by one, so that a storage with memory always has its values
            entry.storage.resize_(entry.size)
            memory = _view_bytes(entry.storage)
            _ = memory.zero_() if entry.copy is None else memory.copy_(entry.copy, non_blocking=True)
        _synchronize(entry.storage for entry in waking)
        same = all(entry.storage.data_ptr() == entry.address for entry in self._slept)
        for entry in self._slept:
            entry.address = entry.storage.data_ptr()
        if not keep_host_copies:
            self.close()
        return same

    def sleep_again(self) -> None:
        """Free the device memory again, and keep the existing host copies instead of making new ones.

        Use this after a failed `wake`, or if the tensors did not change since `wake`.
        """
        awake = [entry.storage for entry in self._slept if entry.storage.nbytes()]
        _free_storages(awake)

    def close(self) -> None:
        """Free the host copies. The content of memory that is not restored is lost."""
        for entry in self._slept:
            if entry.copy is not None and entry.storage.device.type == "cuda":
                unpin(entry.copy)
        self._slept = []


def put_to_sleep(tensors: Iterable[Tensor], *, zeroed_tensors: Iterable[Tensor] = ()) -> SleepingMemory:
    """Copy `tensors` to the host, then free the device memory of `tensors` and of `zeroed_tensors`.

    `zeroed_tensors` are not copied; they are zero after `wake`. Tensors that share memory are copied once, and unlisted
    views of that memory are freed with it. The caller must ensure that no queued work uses the tensors.
    """
    storages = _unique_storages(tensors)
    scratch = {
        address: storage for address, storage in _unique_storages(zeroed_tensors).items() if address not in storages
    }
    assert all(storage.resizable() for storage in (storages | scratch).values()), "a tensor does not own its memory"
    slept = [
        _SleepingStorage(storage, address, storage.nbytes(), allocate_host_bytes(storage.nbytes()))
        for address, storage in storages.items()
    ]
    pinned: list[Tensor] = []
    try:
        for entry in slept:
            assert entry.copy is not None
            if entry.storage.device.type == "cuda":
                pin(entry.copy)
                pinned.append(entry.copy)
            entry.copy.copy_(_view_bytes(entry.storage), non_blocking=True)
        _synchronize(storages.values())
    except BaseException:
        _synchronize(storages.values())
        for copy in pinned:
            unpin(copy)
        raise
    slept += [_SleepingStorage(storage, address, storage.nbytes(), None) for address, storage in scratch.items()]
    _free_storages([entry.storage for entry in slept])
    return SleepingMemory(slept)


def iter_instances(kind: type[T], structure: object) -> Iterator[T]:
    """Yield all instances of a type in nested dataclasses, lists, tuples and dicts.

    An instance that occurs several times is yielded several times.
    """
    if isinstance(structure, kind):
        yield structure
    elif is_dataclass(structure) and not isinstance(structure, type):
        for field in fields(structure):
            yield from iter_instances(kind, getattr(structure, field.name))
    elif isinstance(structure, dict):
        yield from iter_instances(kind, list(structure.values()))
    elif isinstance(structure, list | tuple):
        for part in structure:
            yield from iter_instances(kind, part)


def _unique_storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {storage.data_ptr(): storage for t in tensors if (storage := t.untyped_storage()).nbytes()}


def _free_storages(storages: list[UntypedStorage]) -> None:
    _synchronize(storages)
    for storage in storages:
        storage.resize_(0)
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.empty_cache()


def _view_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
