"""Rows: what the device keeps of each request between steps: its block table and its newest token.

A row belongs to one request from admission to its end. Row `capacity` belongs to nobody: padding of captured steps.
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
    """A request's row, and how much of its table the device has."""

    index: int
    row: Row
    plain: bool  # the logits as they are, and nothing but a token: what most requests want
    blocks: int = 0
    life: int = 0


class Rows:
    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self.padding = capacity
        self.tables = torch.zeros(capacity + 1, width, dtype=torch.int32, device=device)
        self.newest = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self.mirror = np.zeros((capacity + 1, width), np.int32)  # the tables as they will be when all is sent
        self.temperature = np.zeros(capacity + 1, np.float32)
        self.top_k = np.zeros(capacity + 1, np.int32)
        self.top_p = np.ones(capacity + 1, np.float32)
        self.min_p = np.zeros(capacity + 1, np.float32)
        self.seed = np.zeros(capacity + 1, np.int64)
        self._free = list(reversed(range(capacity)))
        self._places: dict[str, Place] = {}

    def __getitem__(self, request_id: str) -> Place:
        return self._places[request_id]

    def get(self, request_id: str) -> Place | None:
        return self._places.get(request_id)

    def add(self, request_id: str, row: Row) -> None:
        assert request_id not in self._places
        index, p = self._free.pop(), row.params
        self._places[request_id] = Place(index, row, row.plain)
        self.temperature[index], self.top_k[index] = p.temperature, min(p.top_k, (1 << 31) - 1)
        self.top_p[index], self.min_p[index] = p.top_p, p.min_p
        self.seed[index] = np.uint64(row.seed % (1 << 64)).astype(np.int64)

    def remove(self, request_id: str) -> None:
        if (place := self._places.pop(request_id, None)) is not None:
            self._free.append(place.index)

    def news(self, work: Sequence[Work]) -> tuple[np.ndarray, np.ndarray]:
        """What the tables on the device lack for this work: positions in the flat tables, and blocks."""
        width = self.mirror.shape[1]
        where: list[np.ndarray] = []
        blocks: list[int] = []
        for w in work:
            place = self._places[w.id]
            if place.life != w.life:
                place.life, place.blocks = w.life, 0
            have, want = place.blocks, len(w.blocks)
            if have == want:
                continue
            fresh = w.blocks[have:want]
            self.mirror[place.index, have:want] = fresh
            where.append(np.arange(place.index * width + have, place.index * width + want))
            blocks.extend(fresh)
            place.blocks = want
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(where), np.array(blocks, np.int32)
