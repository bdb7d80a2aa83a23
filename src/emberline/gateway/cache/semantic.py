"""SemanticCache: answers a question with the cached reply to a similar question.

The semantic cache is off by default because it can be wrong: questions that differ in one word have similar vectors
even if that word changes the answer. So the similarity threshold is high, numbers and negations must be equal, and the
requests must be equal except for the wording of the last message. In the mode `shadow` the provider answers every
request; the cache only counts whether the reply it would have served agrees with the provider's reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.clock import Clock
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.cache.embedder import TextEmbedder
from emberline.gateway.cache.entry import CacheEntry
from emberline.gateway.cache.question import UserQuestion
from emberline.gateway.cache.question_index import (
    QuestionIndex,
    SimilarQuestion,
    Vector,
    cosine_similarity,
    normalize_vector,
)
from emberline.gateway.core.request import GatewayRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS

AGREEMENT_SIMILARITY = 0.85  # cosine from which two replies count as equal
MAX_COMPARED_CHARS = 2000  # of each reply


@dataclass(slots=True)
class SemanticStats:
    lookups: int = 0
    similar: int = 0  # lookups that found a similar question
    served: int = 0
    compared: int = 0  # replies compared in shadow mode
    disagreed: int = 0  # compared replies that differed in meaning


@dataclass(frozen=True, slots=True)
class SemanticLookup:
    """The result of a search: a request's question, its vector, and the similar question if one was found."""

    question: UserQuestion
    vector: Vector
    similar: SimilarQuestion | None


class SemanticCache:
    def __init__(self, embedder: TextEmbedder, clock: Clock, index: QuestionIndex | None = None) -> None:
        self._embedder, self._clock = embedder, clock
        self._index = index or QuestionIndex()
        self.stats = SemanticStats()

    async def look_up(self, call: GatewayRequest) -> SemanticLookup | None:
        """Search for a similar question. Return None if the request has no question or the embedding failed."""
        size = len(call.body)
        question = (
            UserQuestion.from_call(call)
            if size < LARGE_INPUT_BYTES
            else await offload.run(size, UserQuestion.from_call, call)
        )
        if question is None:
            return None
        self.stats.lookups += 1
        vectors = await self._embedder.embed([question.text])
        vector = normalize_vector(vectors[0]) if vectors else None
        if vector is None:
            return None
        similar = self._index.find_similar(question, vector, call.settings.semantic.threshold, self._clock.now())
        self.stats.similar += similar is not None
        return SemanticLookup(question, vector, similar)

    def index_question(self, lookup: SemanticLookup, cache_key: str, ttl_s: float) -> None:
        """Add the question to the index. Its reply was just cached under `cache_key` for `ttl_s` seconds."""
        self._index.add_question(lookup.question, lookup.vector, cache_key, self._clock.now() + ttl_s)

    async def compare_replies(self, similar_reply: CacheEntry, actual_reply: CacheEntry) -> None:
        """In shadow mode, count whether the cached reply agrees with the reply that the provider sent."""
        texts = [
            extract_reply_text(similar_reply)[:MAX_COMPARED_CHARS],
            extract_reply_text(actual_reply)[:MAX_COMPARED_CHARS],
        ]
        if texts[0] != texts[1]:
            vectors = await self._embedder.embed([text or " " for text in texts])
            if vectors is None:
                return
            self.stats.disagreed += cosine_similarity(vectors[0], vectors[1]) < AGREEMENT_SIMILARITY
        self.stats.compared += 1


def extract_reply_text(entry: CacheEntry) -> str:
    """Return the text that the model generated, from a cached reply in any wire format, streamed or not."""
    data = b"".join(entry.chunks)
    if not entry.stream:
        return "".join(_collect_text_fragments(_decode_json(data)))
    lines = [line[5:] for line in data.splitlines() if line.startswith(b"data:")]
    return "".join("".join(_collect_text_fragments(_decode_json(line))) for line in lines)


def _decode_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except JSON_DECODE_ERRORS:
        return None


def _collect_text_fragments(value: Any, field_name: str = "") -> list[str]:
    match value:
        case str():
            return [value] if field_name in ("text", "content", "delta", "arguments", "partial_json") else []
        case list():
            return [text for item in value for text in _collect_text_fragments(item, field_name)]
        case dict():
            return [text for inner, item in value.items() for text in _collect_text_fragments(item, inner)]
    return []
