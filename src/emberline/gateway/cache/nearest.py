"""QuestionIndex: vectors of questions by partition, and the search for the most similar one.

It is bounded: the least recently used partition is evicted, and within a partition the oldest question."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.gateway.cache.question import Question

MOST = 20_000  # in all partitions
MOST_EACH = 1_000

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Known:
    key: str  # of the cache entry
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
    """Return the vector scaled to length 1, or None if its length is zero or not finite."""
    array = np.asarray(vector, dtype=np.float32)
    norm = float(np.linalg.norm(array))
    return array / norm if np.isfinite(norm) and norm > 0 else None


def cosine(one: list[float], two: list[float]) -> float:
    a, b = unit(one), unit(two)
    return float(a @ b) if a is not None and b is not None and a.shape == b.shape else 0.0


class Nearest:
    def __init__(self, most: int = MOST, most_each: int = MOST_EACH) -> None:
        self._most, self._most_each = most, most_each
        self._partitions: OrderedDict[str, _Partition] = OrderedDict()
        self.size = 0

    def find(self, question: Question, vector: Vector, threshold: float, now: float) -> Near | None:
        """Return the most similar question with the same exact features, or None below the threshold."""
        partition = self._partitions.get(question.partition)
        if partition is None or partition.vectors[0].shape != vector.shape:
            return None
        self._partitions.move_to_end(question.partition)
        similarities: Any = partition.matrix() @ vector
        exact = question.exact
        for i in np.argsort(-similarities):
            if similarities[i] < threshold:
                return None
            known = partition.known[i]
            if known.expires > now and known.exact == exact:
                return Near(known.key, float(similarities[i]), known.expires)
        return None

    def add(self, question: Question, vector: Vector, key: str, expires: float) -> None:
        partition = self._partitions.setdefault(question.partition, _Partition())
        self._partitions.move_to_end(question.partition)
        if partition.vectors and partition.vectors[0].shape != vector.shape:  # another embedding model is in use
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
