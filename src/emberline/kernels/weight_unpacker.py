"""WeightUnpacker: unpacks the next uw12 (12 bits each) or 4-bit weight for cuBLAS during the current product.

Two buffers, A and B, alternate. A separate CUDA stream writes a buffer as soon as the product that read it has ended. A
product waits only for its own buffer:

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

from emberline.kernels.packed_weight import PackedWeight, WeightLayout

UnpackFunction = Callable[[PackedWeight, Tensor], object]


class UnpackStream(Protocol):
    """A CUDA stream as the unpacker uses it; `engine/gpu/device.py` implements it."""

    def activate(self) -> AbstractContextManager[object]: ...
    def record_event(self) -> Any: ...
    def wait_event(self, event: Any) -> None: ...


@dataclass(slots=True)
class _UnpackBuffer:
    memory: Tensor
    read_event: Any = None  # event after which the buffer may be overwritten; None: not read in this step
    weight_held: PackedWeight | None = None  # weight whose unpacking was started into this buffer
    written_event: Any = None  # event after which that weight is complete

    def weight_rows(self, weight: PackedWeight) -> Tensor:
        return self.memory[: weight.n * weight.k].view(weight.n, weight.k)


class WeightUnpacker:
    """Unpacks weights on one CUDA stream for the products on another.

    Within a forward pass, CUDA events make products wait for unpacking and the reverse. No event is used across forward
    passes, so that each can be captured into a CUDA graph.
    """

    def __init__(
        self,
        weights: Sequence[PackedWeight],
        num_with_all_rows: int,
        compute_stream: UnpackStream,
        unpack_stream: UnpackStream,
        unpack: UnpackFunction | None = None,
    ) -> None:
        """Prepare to unpack `weights`, which are in the order in which products use them.

        The first `num_with_all_rows` weights multiply all rows of the batch, so that each can be unpacked during the
        product of the weight before it. Two buffers of the size of the largest weight are allocated on first use.
        """
        self._next_weights = dict(pairwise(weights[:num_with_all_rows]))
        self._max_elements = max(weight.n * weight.k for weight in weights)
        self._computing, self._unpacking, self._unpack = compute_stream, unpack_stream, unpack or unpack_weight
        self._buffers: list[_UnpackBuffer] = []

    def begin_step(self) -> WeightUnpacker:
        """Mark all buffers as unused and return self; call this at the beginning of each forward pass."""
        for buffer in self._buffers:
            buffer.read_event = buffer.weight_held = buffer.written_event = None
        return self

    def release(self) -> None:
        """Free the buffers. This is allowed only between forward passes."""
        self._buffers.clear()

    def next_weight(self, weight: PackedWeight) -> PackedWeight | None:
        """Return the next weight after this one; weights with layout ROWS, such as routers of experts, are skipped."""
        following = self._next_weights.get(weight)
        while following is not None and following.layout is WeightLayout.ROWS:
            following = self._next_weights.get(following)
        return following

    @contextmanager
    def unpacked_rows(self, weight: PackedWeight, next_weight: PackedWeight | None = None) -> Iterator[Tensor]:
        """Yield `weight` as bf16 [n, k] for one product that is launched inside the `with` block.

        When the block ends, unpacking of `next_weight` starts; it runs at the same time as the product.
        """
        filled = next((buffer for buffer in self._buffers if buffer.weight_held is weight), None)
        buffer = filled or self._start_unpacking(weight)
        self._computing.wait_event(buffer.written_event)
        yield buffer.weight_rows(weight)
        buffer.weight_held, buffer.read_event = None, self._computing.record_event()
        if next_weight is not None:
            self._start_unpacking(next_weight)

    def _start_unpacking(self, weight: PackedWeight) -> _UnpackBuffer:
        if not self._buffers:
            device = weight.data.device
            memories = (torch.empty(self._max_elements, dtype=torch.bfloat16, device=device) for _ in range(2))
            self._buffers = [_UnpackBuffer(memory) for memory in memories]
        self._buffers.reverse()
        buffer, other = self._buffers
        if buffer.read_event is None:  # first use in this step: the computing stream is past all earlier reads
            buffer.read_event = other.read_event = self._computing.record_event()
        with self._unpacking.activate():
            self._unpacking.wait_event(buffer.read_event)
            self._unpack(weight, buffer.weight_rows(weight))
            buffer.weight_held, buffer.written_event = weight, self._unpacking.record_event()
        return buffer


def is_packed(weight: PackedWeight) -> bool:
    """Return whether `unpack_weight` can unpack the weight."""
    from emberline.kernels.cuda import narrow_layout, uw12

    return isinstance(weight.handle, uw12.UW12Weight | narrow_layout.FourBitWeight)


def unpack_weight(weight: PackedWeight, out: Tensor) -> Tensor:
    """Write a packed GPU weight as bf16 [n, k] into `out`, with rows in the order of `pack_linear`, and return it."""
    from emberline.kernels.cuda import narrow, narrow_layout, uw12

    if isinstance(weight.handle, narrow_layout.FourBitWeight):
        return narrow.unpack(weight.handle, out)
    assert isinstance(weight.handle, uw12.UW12Weight)
    return uw12.unpack(weight.handle, out, pdl=False)
