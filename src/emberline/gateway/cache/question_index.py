"""QuestionIndex: the vectors of cached questions, and the search for the most similar question.

A partition holds the questions of requests that are otherwise equal. A question is compared only with the questions of
its own partition. The index is bounded: it evicts the least recently used partition, and from a full partition the
oldest question.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.gateway.cache.question import UserQuestion

MAX_QUESTIONS = 20_000  # in all partitions
MAX_PARTITION_QUESTIONS = 1_000

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class IndexedQuestion:
    key: str  # of the cache entry
    numbers_and_negations: tuple[list[str], int]
    expires: float


@dataclass(frozen=True, slots=True)
class SimilarQuestion:
    key: str
    similarity: float
    expires: float


@dataclass(slots=True)
class _QuestionPartition:
    vectors: list[Vector] = field(default_factory=list)
    questions: list[IndexedQuestion] = field(default_factory=list)
    cached_matrix: NDArray[np.float32] | None = None

    def vector_matrix(self) -> NDArray[np.float32]:
        if self.cached_matrix is None:
            self.cached_matrix = np.stack(self.vectors)
        return self.cached_matrix


def normalize_vector(vector: list[float]) -> Vector | None:
    """Return the vector scaled to length 1, or None if its length is zero or not finite."""
    array = np.asarray(vector, dtype=np.float32)
    norm = float(np.linalg.norm(array))
    return array / norm if np.isfinite(norm) and norm > 0 else None


def cosine_similarity(first: list[float], second: list[float]) -> float:
    a, b = normalize_vector(first), normalize_vector(second)
    return float(a @ b) if a is not None and b is not None and a.shape == b.shape else 0.0


class QuestionIndex:
    def __init__(
        self, max_questions: int = MAX_QUESTIONS, max_partition_questions: int = MAX_PARTITION_QUESTIONS
    ) -> None:
        self._max_questions, self._max_partition_questions = max_questions, max_partition_questions
        self._partitions: OrderedDict[str, _QuestionPartition] = OrderedDict()
        self.size = 0

    def find_similar(
        self, question: UserQuestion, vector: Vector, threshold: float, now: float
    ) -> SimilarQuestion | None:
        """Return the most similar question that has the same numbers and negations as `question`.

        Return None if no such question reaches the similarity `threshold`. Expired questions are ignored.
        """
        partition = self._partitions.get(question.partition)
        if partition is None or partition.vectors[0].shape != vector.shape:
            return None
        self._partitions.move_to_end(question.partition)
        similarities: Any = partition.vector_matrix() @ vector
        exact = question.numbers_and_negations
        for i in np.argsort(-similarities):
            if similarities[i] < threshold:
                return None
            found = partition.questions[i]
            if found.expires > now and found.numbers_and_negations == exact:
                return SimilarQuestion(found.key, float(similarities[i]), found.expires)
        return None

    def add_question(self, question: UserQuestion, vector: Vector, cache_key: str, expires_at: float) -> None:
        partition = self._partitions.setdefault(question.partition, _QuestionPartition())
        self._partitions.move_to_end(question.partition)
        if partition.vectors and partition.vectors[0].shape != vector.shape:  # another embedding model is in use
            self.size -= len(partition.vectors)
            partition.vectors, partition.questions = [], []
        partition.vectors.append(vector)
        partition.questions.append(IndexedQuestion(cache_key, question.numbers_and_negations, expires_at))
        partition.cached_matrix = None
        self.size += 1
        if len(partition.vectors) > self._max_partition_questions:
            del partition.vectors[0], partition.questions[0]
            self.size -= 1
        while self.size > self._max_questions and len(self._partitions) > 1:
            self.size -= len(self._partitions.popitem(last=False)[1].vectors)
