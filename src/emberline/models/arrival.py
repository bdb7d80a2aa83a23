"""Arrival: a tensor of a file on its way to the device. Pending: a matrix that is made of several."""

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

Cut = tuple[slice, ...]  # of a tensor


def split_stack(whole: Tensor, rows: Sequence[int], gated: bool) -> list[Tensor]:
    """Where the parts of a stack go."""
    if not gated or rows[0] % GATED_ROWS:
        return list(whole.split(list(rows)))
    assert len(rows) == 2 and rows[0] == rows[1]
    return list(whole.view(rows[0] // GATED_ROWS, 2, GATED_ROWS, whole.shape[1]).unbind(1))


class Pending:
    """A matrix that has memory while its parts arrive, and is then handed over."""

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
        self._parts = 0  # that have not arrived

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
    """Bytes [start, end) of a file on their way to `place`, which holds as many elements, in the same order; or those
    that a `cut` leaves of the tensor."""

    def __init__(
        self, name: str, info: TensorInfo, dtype: torch.dtype, place: Tensor | Part, cut: Cut | None = None
    ) -> None:
        self.name = name
        self.file = info.file
        self.start = info.offset
        self.end = info.offset + info.nbytes
        self.size = self.left = info.logical_bytes  # on the device: what is coded in the file grows
        self._to = place
        self._dtype = dtype
        self._shape, self._cut = info.shape, cut
        self._place: Tensor | None = None  # known when the first bytes come
        self._landing: Tensor | None = None  # uint8, flat: the place itself, or a staged copy

    def see(self, at: int, part: Tensor) -> None:
        """Bytes of the file, on the host, before they land: `at` counts from the tensor's first."""

    def land(self, at: int, source: Tensor) -> None:
        """`at`: which byte of the tensor source's first is."""
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
            came = landing.view(self._dtype).view(self._shape)
            place.copy_((came if self._cut is None else came[self._cut]).reshape(place.shape))
        self._place = self._landing = None
        if isinstance(self._to, Part):
            self._to.whole.arrived()


class Places:
    """Which arrivals a piece of a file has bytes for."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._by_file: dict[Path, list[Arrival]] = {}
        for arrival in sorted(arrivals, key=lambda one: one.start):
            if arrival.left:
                self._by_file.setdefault(arrival.file, []).append(arrival)
        self._starts = {file: [one.start for one in found] for file, found in self._by_file.items()}

    def of(self, piece: Piece) -> list[Arrival]:
        found = self._by_file.get(piece.file, [])
        first = max(0, bisect_right(self._starts.get(piece.file, []), piece.offset) - 1)
        end = piece.offset + piece.length
        last = bisect_right(self._starts.get(piece.file, []), end - 1)
        return [arrival for arrival in found[first:last] if arrival.end > piece.offset]


def overlap(piece: Piece, arrival: Arrival, memory: Tensor) -> tuple[int, Tensor]:
    """The part of a piece that is the arrival's, and where in the arrival it begins. `memory` holds the piece."""
    start, end = max(arrival.start, piece.offset), min(arrival.end, piece.offset + piece.length)
    return start - arrival.start, memory[start - piece.offset : end - piece.offset]


def land(piece: Piece, arrivals: Sequence[Arrival], memory: Tensor) -> None:
    for arrival in arrivals:
        at, part = overlap(piece, arrival, memory)
        arrival.see(at, part)
        arrival.land(at, part)
