"""AcceptanceEstimate: the probability that drafted tokens of a request are accepted, from its recent drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_WEIGHT = 4.0  # tried tokens that count as much as the proposer's own confidence
DECAY_PER_TOKEN = 0.97  # of the weight of a result with each later token of the request: half after 23 tokens


@dataclass(slots=True)
class RecentDrafts:
    """Counts of tried and accepted tokens of one request's drafts, in which older drafts count less."""

    position: int  # number of the request's tokens when the counts were last updated
    tried: float = 0.0  # tokens that were compared: those that were right, and the first that was wrong
    accepted: float = 0.0


class AcceptanceEstimate:
    def __init__(self) -> None:
        self._counts: dict[str, RecentDrafts] = {}

    def record(self, request_id: str, position: int, num_draft: int, num_accepted: int) -> None:
        """Record the result of one draft. `position`: number of tokens of the request before it."""
        counts = self._counts.setdefault(request_id, RecentDrafts(position))
        decay = DECAY_PER_TOKEN ** (position - counts.position)
        counts.position = position
        counts.tried = counts.tried * decay + num_accepted + (num_accepted < num_draft)
        counts.accepted = counts.accepted * decay + num_accepted

    def probabilities(self, request_id: str, position: int, confidence: Sequence[float]) -> list[float]:
        """Return for each drafted token the probability that it and all before it are accepted.

        `confidence`: the proposer's estimate for each token, given that those before it are accepted."""
        tried = accepted = 0.0
        if (counts := self._counts.get(request_id)) is not None:
            decay = DECAY_PER_TOKEN ** (position - counts.position)
            tried, accepted = counts.tried * decay, counts.accepted * decay
        probability, found = 1.0, []
        for estimate in confidence:
            probability *= (accepted + PRIOR_WEIGHT * estimate) / (tried + PRIOR_WEIGHT)
            found.append(probability)
        return found

    def forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)
