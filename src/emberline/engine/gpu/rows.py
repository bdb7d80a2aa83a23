"""DeviceRows: the block table and the newest token of each request, kept on the device.

There are as many rows as requests can run at once. A preempted request keeps its row until a request in a step needs
it: by then the host has all of its tokens. The last row is for padding of captured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from emberline.core.plan import Work
from emberline.engine.sampler import Row


@dataclass(slots=True)
class Place:
    """A request's row on the device, and how much of its block table the device has."""

    index: int  # -1: it has no row
    row: Row
    plain: bool  # copied from `sampling` for speed
    blocks: int = 0  # blocks of its table that the device has
    life: int = 0  # preemptions of the request when these were sent
    counted: bool = False  # whether the device has its token counts, for penalties


class Rows:
    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self.padding = capacity
        self.tables = torch.zeros(capacity + 1, width, dtype=torch.int32, device=device)
        self.newest = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self.mirror = np.zeros((capacity + 1, width), np.int32)  # the tables with all updates that will be sent
        self.temperature = np.zeros(capacity + 1, np.float32)
        self.top_k = np.zeros(capacity + 1, np.int32)
        self.top_p = np.ones(capacity + 1, np.float32)
        self.min_p = np.zeros(capacity + 1, np.float32)
        self.seed = np.zeros(capacity + 1, np.int64)
        self._free = list(reversed(range(capacity)))
        self.current: dict[str, Place] = {}  # by request id; only this class changes it

    def __getitem__(self, request_id: str) -> Place:
        return self.current[request_id]

    def places(self, work: Sequence[Work]) -> list[Place]:
        """Return the row of each request in a step."""
        rows = self.current
        return [rows[w.id] for w in work]

    def known(self, work: Sequence[Work]) -> list[Work]:
        """Return the work items of requests that were added and not removed."""
        rows = self.current
        return [w for w in work if w.id in rows]

    def get(self, request_id: str) -> Place | None:
        return self.current.get(request_id)

    def add(self, request_id: str, row: Row) -> None:
        assert request_id not in self.current
        self.current[request_id] = Place(-1, row, row.plain)

    def remove(self, request_id: str) -> None:
        row = self.current.pop(request_id, None)
        if row is not None and row.index >= 0:
            self._free.append(row.index)

    def seat(self, work: Sequence[Work]) -> None:
        """Give each request in a step a row, if necessary that of a request that is not in it."""
        missing = [row for row in self.places(work) if row.index < 0]
        if len(missing) > len(self._free):
            in_step = {w.id for w in work}
            for name, row in self.current.items():
                if row.index >= 0 and name not in in_step:
                    self._free.append(row.index)
                    row.index = -1
        for row in missing:
            self._seat(row, self._free.pop())

    def _seat(self, place: Place, index: int) -> None:
        place.index, place.blocks, place.counted = index, 0, False
        p = place.row.params
        self.temperature[index], self.top_k[index] = p.temperature, min(p.top_k, (1 << 31) - 1)
        self.top_p[index], self.min_p[index] = p.top_p, p.min_p
        self.seed[index] = np.uint64(place.row.seed % (1 << 64)).astype(np.int64)

    def news(self, work: Sequence[Work]) -> tuple[np.ndarray, np.ndarray]:
        """Return what the device's tables lack for this work: indexes into the flat tables, and block ids."""
        width = self.mirror.shape[1]
        indexes: list[np.ndarray] = []
        blocks: list[int] = []
        for w, row in zip(work, self.places(work), strict=True):
            if row.life != w.life:
                row.life, row.blocks = w.life, 0
            if row.blocks == len(w.blocks):
                continue
            start, end = row.blocks, len(w.blocks)
            new = w.blocks[start:end]
            self.mirror[row.index, start:end] = new
            indexes.append(np.arange(row.index * width + start, row.index * width + end))
            blocks.extend(new)
            row.blocks = end
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(indexes), np.array(blocks, np.int32)
