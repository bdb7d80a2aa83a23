"""Sleep: memory of a device is given back, and comes back into the same Tensor objects with what was in it.

Weights wait in pinned host memory; what is only scratch comes back as zeros. A tensor may be at another address after
`wake`. Whatever keeps raw addresses (captured CUDA graphs, tensor maps, pointers read once) must be dropped before and
made again after, unless `wake` says that nothing moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor, UntypedStorage

from emberline.models.pinned import host_bytes, pin, unpin

T = TypeVar("T")


@dataclass(slots=True)
class _Slept:
    storage: UntypedStorage
    address: int  # where it was when it was last whole
    size: int
    copy: Tensor | None  # uint8, on the host; None: it comes back as zeros


class Sleep:
    """Memory that was given back, with what was in it."""

    def __init__(self, slept: list[_Slept]) -> None:
        self._slept = slept

    @property
    def nbytes(self) -> int:
        return sum(one.size for one in self._slept)

    @property
    def copied_bytes(self) -> int:
        """Of these, so many wait on the host."""
        return sum(one.size for one in self._slept if one.copy is not None)

    def wake(self, *, keep: bool = False) -> bool:
        """Everything is back when it returns. True: at the addresses of before. If memory runs out, what came back
        stays and it can be called again. `keep`: the copies stay on the host, for `again`."""
        waking = [one for one in self._slept if one.storage.nbytes() == 0]
        for one in waking:  # each at once, so that a storage with memory always has its values
            one.storage.resize_(one.size)
            memory = _bytes_of(one.storage)
            _ = memory.zero_() if one.copy is None else memory.copy_(one.copy, non_blocking=True)
        _synchronize(one.storage for one in waking)
        same = all(one.storage.data_ptr() == one.address for one in self._slept)
        for one in self._slept:
            one.address = one.storage.data_ptr()
        if not keep:
            self.close()
        return same

    def again(self) -> None:
        """Gives the memory back once more, without a copy: what comes back is what came back before. For tensors that
        nobody writes, and for what a failed wake has left."""
        awake = [one.storage for one in self._slept if one.storage.nbytes()]
        _free(awake)

    def close(self) -> None:
        """Lets the copies go; what is still asleep is lost."""
        for one in self._slept:
            if one.copy is not None and one.storage.device.type == "cuda":
                unpin(one.copy)
        self._slept = []


def sleep(tensors: Iterable[Tensor], *, zeroed: Iterable[Tensor] = ()) -> Sleep:
    """Tensors that share memory are one copy; `zeroed` are not copied. Nothing is freed before all is copied. No work
    may be queued that still uses them; views that are not listed lose their values too."""
    storages = _storages(tensors)
    scratch = {address: storage for address, storage in _storages(zeroed).items() if address not in storages}
    assert all(storage.resizable() for storage in (storages | scratch).values()), "memory of somebody else"
    slept = [
        _Slept(storage, address, storage.nbytes(), host_bytes(storage.nbytes()))
        for address, storage in storages.items()
    ]
    pinned: list[Tensor] = []
    try:
        for one in slept:
            assert one.copy is not None
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
    slept += [_Slept(storage, address, storage.nbytes(), None) for address, storage in scratch.items()]
    _free([one.storage for one in slept])
    return Sleep(slept)


def every(kind: type[T], thing: object) -> Iterator[T]:
    """All of a kind that a structure of dataclasses, lists, tuples and dicts holds; what is shared, again each time."""
    if isinstance(thing, kind):
        yield thing
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from every(kind, getattr(thing, field.name))
    elif isinstance(thing, dict):
        yield from every(kind, list(thing.values()))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from every(kind, part)


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {storage.data_ptr(): storage for t in tensors if (storage := t.untyped_storage()).nbytes()}


def _free(storages: list[UntypedStorage]) -> None:
    _synchronize(storages)
    for storage in storages:
        storage.resize_(0)
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.empty_cache()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
