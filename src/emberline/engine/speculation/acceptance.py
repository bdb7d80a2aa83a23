"""AcceptanceEstimate: the probability that drafted tokens of a request are accepted, from its recent drafts.

Each place of a draft has counts of its own: a draft model's later tokens are accepted less often than its first, given
that those before them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_WEIGHT = 4.0  # tried tokens that count as much as the proposer's own confidence
PLACE_WEIGHT = 2.0  # tokens tried at one place of drafts that count as much as the estimate for all places
MAX_PLACES = 8  # places of a draft with counts of their own; the last one's are for all further places too
DECAY_PER_TOKEN = 0.97  # of the weight of a result with each later token of the request: half after 23 tokens


@dataclass(slots=True)
class RecentDrafts:
    """Counts of tried and accepted tokens of one request's drafts, by place, in which older drafts count less."""

    position: int  # number of the request's tokens when the counts were last updated
    # Tokens that were compared: those that were right, and the first that was wrong.
    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_PLACES)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_PLACES)


class AcceptanceEstimate:
    def __init__(self) -> None:
        self._counts: dict[str, RecentDrafts] = {}

    def record(self, request_id: str, position: int, num_draft: int, num_accepted: int) -> None:
        """Record the result of one draft. `position`: number of tokens of the request before it."""
        counts = self._counts.setdefault(request_id, RecentDrafts(position))
        decay = DECAY_PER_TOKEN ** (position - counts.position)
        counts.position = position
        counts.tried = [count * decay for count in counts.tried]
        counts.accepted = [count * decay for count in counts.accepted]
        for place in range(num_accepted):
            counts.tried[min(place, MAX_PLACES - 1)] += 1.0
            counts.accepted[min(place, MAX_PLACES - 1)] += 1.0
        if num_accepted < num_draft:
            counts.tried[min(num_accepted, MAX_PLACES - 1)] += 1.0

    def probabilities(self, request_id: str, position: int, confidence: Sequence[float]) -> list[float]:
        """Return for each drafted token the probability that it and all before it are accepted.

        `confidence`: the proposer's estimate for each token, given that those before it are accepted."""
        counts = self._counts.get(request_id)
        probability, found = 1.0, []
        if counts is None:
            for estimate in confidence:
                probability *= estimate
                found.append(probability)
            return found
        decay = DECAY_PER_TOKEN ** (position - counts.position)
        tried, accepted = sum(counts.tried) * decay, sum(counts.accepted) * decay
        for place, estimate in enumerate(confidence):
            of_all = (accepted + PRIOR_WEIGHT * estimate) / (tried + PRIOR_WEIGHT)
            here = min(place, MAX_PLACES - 1)
            tried_here, accepted_here = counts.tried[here] * decay, counts.accepted[here] * decay
            probability *= (accepted_here + PLACE_WEIGHT * of_all) / (tried_here + PLACE_WEIGHT)
            found.append(probability)
        return found

    def forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)
