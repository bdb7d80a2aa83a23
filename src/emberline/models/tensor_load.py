"""TensorLoad, PendingMatrix: copy tensors of a file to the device, and assemble matrices from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from emberline.hub.tensorfile import TensorInfo
from emberline.kernels.work_limits import GATE_GROUP_ROWS
from emberline.models.direct_io import FileChunk


def split_stack(stacked: Tensor, rows: Sequence[int], gated: bool) -> list[Tensor]:
    """Return a view of the stacked matrix for each of its parts; the rows of gated parts are interleaved.

    Gated parts are a gate and an up matrix, or one matrix with the rows of both.
    """
    width = len(stacked) // 2
    if not gated or width % GATE_GROUP_ROWS:
        return list(stacked.split(list(rows)))
    assert list(rows) in ([width, width], [2 * width])
    groups = stacked.view(width // GATE_GROUP_ROWS, 2, GATE_GROUP_ROWS, stacked.shape[1])
    return [groups.transpose(0, 1)] if len(rows) == 1 else list(groups.unbind(1))


class PendingTensors(Protocol):
    """Tensors that are allocated when their first bytes arrive."""

    def get_destination(self, index: int) -> Tensor: ...

    def mark_part_complete(self) -> None: ...


class PendingMatrix:
    """A matrix that is allocated when its first part arrives and passed to `on_complete` after the last."""

    def __init__(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        select: Callable[[Tensor, int], Tensor],
        on_complete: Callable[[Tensor], None],
        *,
        zeroed: bool = False,
    ) -> None:
        """`select`: returns a view of the part with this index. `zeroed`: elements that no part fills are zero."""
        self._size, self._dtype, self._device, self._zeroed = size, dtype, device, zeroed
        self._select, self._on_complete = select, on_complete
        self._whole: Tensor | None = None
        self._missing_parts = 0

    def add_part(self, index: int) -> MatrixPart:
        self._missing_parts += 1
        return MatrixPart(self, index)

    def get_destination(self, index: int) -> Tensor:
        if self._whole is None:
            allocate = torch.zeros if self._zeroed else torch.empty
            self._whole = allocate(self._size, dtype=self._dtype, device=self._device)
        return self._select(self._whole, index)

    def mark_part_complete(self) -> None:
        self._missing_parts -= 1
        if self._missing_parts == 0:
            assert self._whole is not None
            whole, self._whole = self._whole, None
            self._on_complete(whole)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    matrix: PendingTensors
    index: int
    is_stored_form: bool = False  # whether it is a part of a quantised matrix


class TensorPlacement(NamedTuple):
    """A tensor of a file, and where its values are copied to."""

    name: str
    info: TensorInfo
    dtype: torch.dtype  # dtype of the values in the file
    destination: Tensor | MatrixPart
    offset: float = 0.0  # added to each element
    factor: float = 1.0  # by which each element is multiplied after that


class TensorLoad:
    """The load of one tensor: it copies bytes [start, end) of a file to a tensor on the device."""

    def __init__(self, placement: TensorPlacement) -> None:
        info = placement.info
        self.name = placement.name
        self.file = info.file
        self.start = info.offset
        self.end = info.offset + info.nbytes
        self.num_bytes = self.remaining_bytes = info.logical_bytes  # decoded bytes, on the device
        self._target = placement.destination
        self._dtype = placement.dtype
        self._offset, self._factor = placement.offset, placement.factor
        self._shape = info.shape
        self._destination: Tensor | None = None  # set when the first bytes arrive
        self._staging: Tensor | None = None  # flat uint8 view of the destination, or a staging tensor

    def verify_part(self, offset: int, part: Tensor) -> None:
        """Check a part of the tensor in host memory before it is copied.

        It begins at byte `offset` of the tensor. Subclasses may raise ModelFileError. By default nothing is checked.
        """

    def copy_part(self, offset: int, source: Tensor) -> None:
        """Copy a part of the tensor, from its byte `offset` on, to the destination or a staging tensor."""
        if self._destination is None or self._staging is None:
            self._destination = (
                self._target
                if isinstance(self._target, Tensor)
                else self._target.matrix.get_destination(self._target.index)
            )
            self._staging = (
                torch.empty(self.num_bytes, dtype=torch.uint8, device=self._destination.device)
                if self._destination.dtype != self._dtype or not self._destination.is_contiguous()
                else self._destination.view(-1).view(torch.uint8)
            )
        self._staging[offset : offset + len(source)].copy_(source, non_blocking=True)
        self.remaining_bytes -= len(source)
        if self.remaining_bytes == 0:
            self._convert_staging(self._destination, self._staging)

    def _convert_staging(self, destination: Tensor, staging: Tensor) -> None:
        if staging.data_ptr() != destination.data_ptr():
            destination.copy_(staging.view(self._dtype).view(self._shape).reshape(destination.shape))
        if self._offset:
            destination.add_(self._offset)
        if self._factor != 1.0:
            destination.mul_(self._factor)
        self._destination = self._staging = None
        if isinstance(self._target, MatrixPart):
            self._target.matrix.mark_part_complete()


class TensorLoadIndex:
    """Finds the tensor loads that need bytes of a given chunk of a file."""

    def __init__(self, loads: Sequence[TensorLoad]) -> None:
        self._by_file: dict[Path, list[TensorLoad]] = {}
        for load in sorted(loads, key=lambda load: load.start):
            if load.remaining_bytes:
                self._by_file.setdefault(load.file, []).append(load)
        self._starts = {file: [load.start for load in file_loads] for file, file_loads in self._by_file.items()}

    def find_loads(self, chunk: FileChunk) -> list[TensorLoad]:
        loads = self._by_file.get(chunk.file, [])
        first = max(0, bisect_right(self._starts.get(chunk.file, []), chunk.offset) - 1)
        end = chunk.offset + chunk.length
        last = bisect_right(self._starts.get(chunk.file, []), end - 1)
        return [load for load in loads[first:last] if load.end > chunk.offset]


def slice_overlapping_bytes(chunk: FileChunk, load: TensorLoad, memory: Tensor) -> tuple[int, Tensor]:
    """Return the part of a chunk that belongs to the load, as (offset in the tensor, bytes).

    `memory` holds the bytes of the chunk.
    """
    start, end = max(load.start, chunk.offset), min(load.end, chunk.offset + chunk.length)
    return start - load.start, memory[start - chunk.offset : end - chunk.offset]


def copy_chunk(chunk: FileChunk, loads: Sequence[TensorLoad], memory: Tensor) -> None:
    """Check the bytes of a chunk, which are in `memory`, and copy them to the tensors of all `loads`."""
    for load in loads:
        offset, part = slice_overlapping_bytes(chunk, load, memory)
        load.verify_part(offset, part)
        load.copy_part(offset, part)


def list_byte_ranges(loads: Sequence[TensorLoad]) -> dict[Path, list[tuple[int, int]]]:
    """Return the byte ranges (begin, end) of each file that these loads need."""
    ranges: dict[Path, list[tuple[int, int]]] = {}
    for load in loads:
        ranges.setdefault(load.file, []).append((load.start, load.end))
    return ranges
