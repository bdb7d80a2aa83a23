"""Nearest: vectors of questions, by partition, and the one most like another. Bounded: of too many partitions the one
unused for longest goes, of too many questions in one the oldest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.gateway.cache.question import Question

MOST = 20_000  # questions in all
MOST_EACH = 1_000  # in one partition

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Known:
    key: str  # of the entry
    exact: tuple[list[str], int]
    expires: float


@dataclass(frozen=True, slots=True)
class Near:
    key: str
    similarity: float
    expires: float


@dataclass(slots=True)
class _Partition:
    vectors: list[Vector] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    stacked: NDArray[np.float32] | None = None

    def matrix(self) -> NDArray[np.float32]:
        if self.stacked is None:
            self.stacked = np.stack(self.vectors)
        return self.stacked


def unit(vector: list[float]) -> Vector | None:
    """None: it has no direction."""
    made = np.asarray(vector, dtype=np.float32)
    norm = float(np.linalg.norm(made))
    return made / norm if np.isfinite(norm) and norm > 0 else None


def cosine(one: list[float], two: list[float]) -> float:
    a, b = unit(one), unit(two)
    return float(a @ b) if a is not None and b is not None and a.shape == b.shape else 0.0


class Nearest:
    def __init__(self, most: int = MOST, most_each: int = MOST_EACH) -> None:
        self._most, self._most_each = most, most_each
        self._partitions: OrderedDict[str, _Partition] = OrderedDict()
        self.size = 0

    def find(self, question: Question, vector: Vector, threshold: float, now: float) -> Near | None:
        """The most similar one that is similar enough, alike in what must be equal, and not expired."""
        partition = self._partitions.get(question.partition)
        if partition is None or partition.vectors[0].shape != vector.shape:
            return None
        self._partitions.move_to_end(question.partition)
        similar: Any = partition.matrix() @ vector
        exact = question.exact
        for i in np.argsort(-similar):
            if similar[i] < threshold:
                return None
            known = partition.known[i]
            if known.expires > now and known.exact == exact:
                return Near(known.key, float(similar[i]), known.expires)
        return None

    def add(self, question: Question, vector: Vector, key: str, expires: float) -> None:
        partition = self._partitions.setdefault(question.partition, _Partition())
        self._partitions.move_to_end(question.partition)
        if partition.vectors and partition.vectors[0].shape != vector.shape:  # the embedder was changed
            self.size -= len(partition.vectors)
            partition.vectors, partition.known = [], []
        partition.vectors.append(vector)
        partition.known.append(Known(key, question.exact, expires))
        partition.stacked = None
        self.size += 1
        if len(partition.vectors) > self._most_each:
            del partition.vectors[0], partition.known[0]
            self.size -= 1
        while self.size > self._most and len(self._partitions) > 1:
            self.size -= len(self._partitions.popitem(last=False)[1].vectors)
