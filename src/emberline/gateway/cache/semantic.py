"""SemanticCache: serves the reply to a similar question.

It is off by default, because it can be wrong: questions that differ in one word have similar vectors even if that word
changes the answer. Hence the threshold is high, numbers and negations must be equal, and everything but the last turn's
wording must be equal. The mode `shadow` serves nothing, but compares the reply it would have served with the actual
one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.core.clock import Clock
from emberline.core.offload import LARGE, offload
from emberline.gateway.cache.embedder import Embedder
from emberline.gateway.cache.entry import Entry
from emberline.gateway.cache.nearest import Near, Nearest, Vector, cosine, unit
from emberline.gateway.cache.question import Question
from emberline.gateway.call import Call
from emberline.net.notjson import NOT_JSON

SAME = 0.85  # cosine from which two replies count as equal
READ = 2000  # of each reply


@dataclass(slots=True)
class SemanticStats:
    asked: int = 0
    near: int = 0  # lookups that found a similar question
    served: int = 0
    compared: int = 0  # replies compared in shadow mode
    disagreed: int = 0  # compared replies that differed in meaning


@dataclass(frozen=True, slots=True)
class Look:
    """The question of a call, its vector, and the similar question that was found."""

    question: Question
    vector: Vector
    near: Near | None


class Semantic:
    def __init__(self, embedder: Embedder, clock: Clock, nearest: Nearest | None = None) -> None:
        self._embedder, self._clock = embedder, clock
        self._nearest = nearest or Nearest()
        self.stats = SemanticStats()

    async def look(self, call: Call) -> Look | None:
        """Search for a similar question; returns None if the call has no question or embedding failed."""
        size = len(call.body)
        question = Question.of(call) if size < LARGE else await offload.run(size, Question.of, call)
        if question is None:
            return None
        self.stats.asked += 1
        vectors = await self._embedder.embed([question.text])
        vector = unit(vectors[0]) if vectors else None
        if vector is None:
            return None
        near = self._nearest.find(question, vector, call.settings.semantic.threshold, self._clock.now())
        self.stats.near += near is not None
        return Look(question, vector, near)

    def learn(self, look: Look, key: str, seconds: float) -> None:
        """Index the question, whose reply is now in the cache for so many seconds."""
        self._nearest.add(look.question, look.vector, key, self._clock.now() + seconds)

    async def compare(self, would: Entry, came: Entry) -> None:
        """Count whether the reply that would have been served agrees with the actual one (shadow mode)."""
        texts = [said(would)[:READ], said(came)[:READ]]
        if texts[0] != texts[1]:
            vectors = await self._embedder.embed([text or " " for text in texts])
            if vectors is None:
                return
            self.stats.disagreed += cosine(vectors[0], vectors[1]) < SAME
        self.stats.compared += 1


def said(entry: Entry) -> str:
    """Return the text of a reply in any dialect, whole or streamed."""
    data = b"".join(entry.chunks)
    if not entry.stream:
        return "".join(_words(_json(data)))
    lines = [line[5:] for line in data.splitlines() if line.startswith(b"data:")]
    return "".join("".join(_words(_json(line))) for line in lines)


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except NOT_JSON:
        return None


def _words(found: Any, name: str = "") -> list[str]:
    match found:
        case str():
            return [found] if name in ("text", "content", "delta", "arguments", "partial_json") else []
        case list():
            return [word for item in found for word in _words(item, name)]
        case dict():
            return [word for inner, item in found.items() for word in _words(item, inner)]
    return []
