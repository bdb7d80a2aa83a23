"""Rows: what the device keeps of each request between steps: its block table and its newest token.

There are as many rows as requests can run at once. One that was preempted keeps its row until somebody in a step needs
it: all that was there is known to the host by then. Row `capacity` belongs to nobody: padding of captured steps.
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
    """A request's row, if it has one, and how much of its table the device has."""

    index: int  # -1: none
    row: Row
    plain: bool  # the logits as they are, and nothing but a token: what most requests want
    blocks: int = 0
    life: int = 0
    counted: bool = False  # whether the device has the counts of its tokens, for penalties


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
        self.current: dict[str, Place] = {}  # by request; read it without changing it

    def __getitem__(self, request_id: str) -> Place:
        return self.current[request_id]

    def places(self, work: Sequence[Work]) -> list[Place]:
        """Return the place of each request in a step."""
        places = self.current
        return [places[w.id] for w in work]

    def known(self, work: Sequence[Work]) -> list[Work]:
        """Return the work of requests that have a place."""
        places = self.current
        return [w for w in work if w.id in places]

    def get(self, request_id: str) -> Place | None:
        return self.current.get(request_id)

    def add(self, request_id: str, row: Row) -> None:
        assert request_id not in self.current
        self.current[request_id] = Place(-1, row, row.plain)

    def remove(self, request_id: str) -> None:
        place = self.current.pop(request_id, None)
        if place is not None and place.index >= 0:
            self._free.append(place.index)

    def seat(self, work: Sequence[Work]) -> None:
        """Gives everybody in a step a row, if need be one of somebody who is not."""
        missing = [place for place in self.places(work) if place.index < 0]
        if len(missing) > len(self._free):
            seated = {w.id for w in work}
            for name, place in self.current.items():
                if place.index >= 0 and name not in seated:
                    self._free.append(place.index)
                    place.index = -1
        for place in missing:
            self._seat(place, self._free.pop())

    def _seat(self, place: Place, index: int) -> None:
        place.index, place.blocks, place.counted = index, 0, False
        p = place.row.params
        self.temperature[index], self.top_k[index] = p.temperature, min(p.top_k, (1 << 31) - 1)
        self.top_p[index], self.min_p[index] = p.top_p, p.min_p
        self.seed[index] = np.uint64(place.row.seed % (1 << 64)).astype(np.int64)

    def news(self, work: Sequence[Work]) -> tuple[np.ndarray, np.ndarray]:
        """What the tables on the device lack for this work: positions in the flat tables, and blocks."""
        width = self.mirror.shape[1]
        where: list[np.ndarray] = []
        blocks: list[int] = []
        for w, place in zip(work, self.places(work), strict=True):
            if place.life != w.life:
                place.life, place.blocks = w.life, 0
            if place.blocks == len(w.blocks):
                continue
            have, want = place.blocks, len(w.blocks)
            fresh = w.blocks[have:want]
            self.mirror[place.index, have:want] = fresh
            where.append(np.arange(place.index * width + have, place.index * width + want))
            blocks.extend(fresh)
            place.blocks = want
        if not blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        return np.concatenate(where), np.array(blocks, np.int32)
