"""Ahead: packed weights as plain rows for products that read those, the next ones made while a product runs.

Two places take turns. Rows are written on a lane of their own, when the product that read that place before has ended;
a product waits for its own rows alone:

    computing   product 0 (A)     product 1 (B)     product 2 (A)
    unpacking   1 into B          2 into A          3 into B
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from emberline.kernels.packed import PackedWeight

Unpack = Callable[[PackedWeight, Tensor], object]


class Lane(Protocol):
    """Work in order, beside that of other lanes: `engine/gpu/device.py` has them."""

    def working(self) -> AbstractContextManager[object]: ...
    def mark(self) -> Any: ...
    def after(self, mark: Any) -> None: ...


@dataclass(slots=True)
class _Place:
    memory: Tensor
    read: Any = None  # the mark after which it may be written; None: not since the step began
    holds: PackedWeight | None = None  # what was begun here
    written: Any = None  # the mark after which that is whole

    def rows(self, weight: PackedWeight) -> Tensor:
        return self.memory[: weight.n * weight.k].view(weight.n, weight.k)


class Ahead:
    """Of one computing lane. Within a step marks say what comes first; from step to step that lane's order does, so
    that a step may be captured."""

    def __init__(
        self,
        order: Sequence[PackedWeight],
        alike: int,
        computing: Lane,
        unpacking: Lane,
        unpack: Unpack | None = None,
    ) -> None:
        """`order`: weights as they are used, one right after the other; the first `alike` by the same rows of x. A
        place has room for the largest; it is allocated when it is first needed."""
        self._next = dict(pairwise(order[:alike]))
        self._most = max(weight.n * weight.k for weight in order)
        self._computing, self._unpacking, self._unpack = computing, unpacking, unpack or _unpack
        self._places: list[_Place] = []

    def anew(self) -> Ahead:
        """At the beginning of a step, captured or not: nothing has been begun."""
        for place in self._places:
            place.read = place.holds = place.written = None
        return self

    def forget(self) -> None:
        """Gives the memory back, between steps."""
        self._places.clear()

    def following(self, weight: PackedWeight) -> PackedWeight | None:
        return self._next.get(weight)

    @contextmanager
    def rows(self, weight: PackedWeight, then: PackedWeight | None = None) -> Iterator[Tensor]:
        """bf16 [n, k], for a product that is launched inside. `then`: what is asked for next, and begun now."""
        place = next((place for place in self._places if place.holds is weight), None) or self._begin(weight)
        self._computing.after(place.written)
        yield place.rows(weight)
        place.holds, place.read = None, self._computing.mark()
        if then is not None:
            self._begin(then)

    def _begin(self, weight: PackedWeight) -> _Place:
        if not self._places:
            device = weight.data.device
            self._places = [_Place(torch.empty(self._most, dtype=torch.bfloat16, device=device)) for _ in range(2)]
        self._places.reverse()
        place, other = self._places
        if place.read is None:  # the first of a step: all before it have read what they wanted
            place.read = other.read = self._computing.mark()
        with self._unpacking.working():
            self._unpacking.after(place.read)
            self._unpack(weight, place.rows(weight))
            place.holds, place.written = weight, self._unpacking.mark()
        return place


def _unpack(weight: PackedWeight, out: Tensor) -> None:
    from emberline.kernels.cuda import uw12

    assert isinstance(weight.handle, uw12.Packed)
    uw12.unpack(weight.handle, out, pdl=False)
