"""TensorLoad: copies one tensor of a file to the device.

PendingMatrix: a matrix assembled from several tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emberline.hub.tensorfile import TensorInfo
from emberline.kernels.tiles import GATED_ROWS
from emberline.models.reader import Piece

Cut = tuple[slice, ...]  # the part of a tensor that a shard holds


def split_stack(whole: Tensor, rows: Sequence[int], gated: bool) -> list[Tensor]:
    """Return the views of a stacked matrix that its parts are copied to; gated parts are interleaved."""
    if not gated or rows[0] % GATED_ROWS:
        return list(whole.split(list(rows)))
    assert len(rows) == 2 and rows[0] == rows[1]
    return list(whole.view(rows[0] // GATED_ROWS, 2, GATED_ROWS, whole.shape[1]).unbind(1))


class Pending:
    """A matrix that is allocated when its first part arrives and passed to `on_complete` after the last."""

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        split: Callable[[Tensor], list[Tensor]],
        settle: Callable[[Tensor], None],
    ) -> None:
        self._size, self._dtype, self._device = (rows, columns), dtype, device
        self._split, self._settle = split, settle
        self._whole: Tensor | None = None
        self._parts = 0

    def part(self, index: int) -> Part:
        self._parts += 1
        return Part(self, index)

    def place(self, index: int) -> Tensor:
        if self._whole is None:
            self._whole = torch.empty(self._size, dtype=self._dtype, device=self._device)
        return self._split(self._whole)[index]

    def arrived(self) -> None:
        self._parts -= 1
        if self._parts == 0:
            assert self._whole is not None
            self._settle(self._whole)
            self._whole = None


@dataclass(frozen=True, slots=True)
class Part:
    whole: Pending
    index: int


class Arrival:
    """The copy of a tensor, bytes [start, end) of a file, to `destination` on the device.

    The elements keep their order. With `shard_slices`, only that part of the tensor is copied to `destination`.
    """

    def __init__(
        self, name: str, info: TensorInfo, dtype: torch.dtype, place: Tensor | Part, cut: Cut | None = None
    ) -> None:
        self.name = name
        self.file = info.file
        self.start = info.offset
        self.end = info.offset + info.nbytes
        self.size = self.left = info.logical_bytes  # decoded bytes, on the device
        self._to = place
        self._dtype = dtype
        self._shape, self._cut = info.shape, cut
        self._place: Tensor | None = None  # set when the first bytes arrive
        self._landing: Tensor | None = None  # flat uint8 view of the destination, or a staging tensor

    def see(self, at: int, part: Tensor) -> None:
        """Verify bytes of the file on the host before they are copied; `offset` is from the tensor's start."""

    def land(self, at: int, source: Tensor) -> None:
        """Copy bytes of the tensor, the first of which has this offset, towards the destination."""
        if self._place is None or self._landing is None:
            self._place = self._to if isinstance(self._to, Tensor) else self._to.whole.place(self._to.index)
            self._landing = (
                torch.empty(self.size, dtype=torch.uint8, device=self._place.device)
                if self._place.dtype != self._dtype or not self._place.is_contiguous() or self._cut is not None
                else self._place.view(-1).view(torch.uint8)
            )
        self._landing[at : at + len(source)].copy_(source, non_blocking=True)
        self.left -= len(source)
        if self.left == 0:
            self._finish(self._place, self._landing)

    def _finish(self, place: Tensor, landing: Tensor) -> None:
        if landing.data_ptr() != place.data_ptr():
            loaded = landing.view(self._dtype).view(self._shape)
            place.copy_((loaded if self._cut is None else loaded[self._cut]).reshape(place.shape))
        self._place = self._landing = None
        if isinstance(self._to, Part):
            self._to.whole.arrived()


class Places:
    """Finds the tensor loads that a chunk of a file has bytes for."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._by_file: dict[Path, list[Arrival]] = {}
        for load in sorted(arrivals, key=lambda load: load.start):
            if load.left:
                self._by_file.setdefault(load.file, []).append(load)
        self._starts = {file: [load.start for load in file_loads] for file, file_loads in self._by_file.items()}

    def of(self, piece: Piece) -> list[Arrival]:
        loads = self._by_file.get(piece.file, [])
        first = max(0, bisect_right(self._starts.get(piece.file, []), piece.offset) - 1)
        end = piece.offset + piece.length
        last = bisect_right(self._starts.get(piece.file, []), end - 1)
        return [load for load in loads[first:last] if load.end > piece.offset]


def overlap(piece: Piece, arrival: Arrival, memory: Tensor) -> tuple[int, Tensor]:
    """Return the offset in the tensor and the bytes of a chunk, held in `memory`, that belong to the load."""
    start, end = max(arrival.start, piece.offset), min(arrival.end, piece.offset + piece.length)
    return start - arrival.start, memory[start - piece.offset : end - piece.offset]


def land(piece: Piece, arrivals: Sequence[Arrival], memory: Tensor) -> None:
    """Verify and copy the bytes of a chunk, held in `memory`, for each of the loads."""
    for load in arrivals:
        offset, part = overlap(piece, load, memory)
        load.see(offset, part)
        load.land(offset, part)
