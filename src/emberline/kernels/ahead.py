"""WeightUnpacker: unpacks uw12 weights into plain rows for cuBLAS, the next matrix while the current product runs.

Two buffers alternate. A stream of its own writes the rows as soon as the product that read the buffer before has ended;
a product waits only for its own rows:

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
    """A CUDA stream as the unpacker uses it; `engine/gpu/device.py` implements it."""

    def working(self) -> AbstractContextManager[object]: ...
    def mark(self) -> Any: ...
    def after(self, mark: Any) -> None: ...


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    read: Any = None  # event after which the buffer may be overwritten; None: not read in this step
    holds: PackedWeight | None = None  # weight whose unpacking was started into this buffer
    written: Any = None  # event after which that weight is complete

    def rows(self, weight: PackedWeight) -> Tensor:
        return self.memory[: weight.n * weight.k].view(weight.n, weight.k)


class Ahead:
    """Unpacks the weights of one computing stream.

    Within a step, events order unpacking and products. From step to step the computing stream's own order does, so that
    a step can be captured into a CUDA graph.
    """

    def __init__(
        self,
        order: Sequence[PackedWeight],
        alike: int,
        computing: Lane,
        unpacking: Lane,
        unpack: Unpack | None = None,
    ) -> None:
        """Prepare for `weights`, in the order of their use; the first `shared_rows_count` of them multiply the same x.

        A buffer holds the largest of them. Buffers are allocated on first use.
        """
        self._next_weights = dict(pairwise(order[:alike]))
        self._max_elements = max(weight.n * weight.k for weight in order)
        self._computing, self._unpacking, self._unpack = computing, unpacking, unpack or _unpack
        self._places: list[_Buffer] = []

    def anew(self) -> Ahead:
        """Reset the buffers at the beginning of a step, captured or not, and return self."""
        for buffer in self._places:
            buffer.read = buffer.holds = buffer.written = None
        return self

    def forget(self) -> None:
        """Free the buffers; only between steps."""
        self._places.clear()

    def following(self, weight: PackedWeight) -> PackedWeight | None:
        return self._next_weights.get(weight)

    @contextmanager
    def rows(self, weight: PackedWeight, then: PackedWeight | None = None) -> Iterator[Tensor]:
        """Give `weight` as bf16 [n, k] for one product that is launched inside the block.

        Unpacking of `next_weight` starts at once, beside that product.
        """
        filled = next((buffer for buffer in self._places if buffer.holds is weight), None)
        buffer = filled or self._start_unpacking(weight)
        self._computing.after(buffer.written)
        yield buffer.rows(weight)
        buffer.holds, buffer.read = None, self._computing.mark()
        if then is not None:
            self._start_unpacking(then)

    def _start_unpacking(self, weight: PackedWeight) -> _Buffer:
        if not self._places:
            device = weight.data.device
            memories = (torch.empty(self._max_elements, dtype=torch.bfloat16, device=device) for _ in range(2))
            self._places = [_Buffer(memory) for memory in memories]
        self._places.reverse()
        buffer, other = self._places
        if buffer.read is None:  # first use in this step: the computing stream is past all earlier reads
            buffer.read = other.read = self._computing.mark()
        with self._unpacking.working():
            self._unpacking.after(buffer.read)
            self._unpack(weight, buffer.rows(weight))
            buffer.holds, buffer.written = weight, self._unpacking.mark()
        return buffer


def _unpack(weight: PackedWeight, out: Tensor) -> None:
    from emberline.kernels.cuda import uw12

    assert isinstance(weight.handle, uw12.Packed)
    uw12.unpack(weight.handle, out, pdl=False)
