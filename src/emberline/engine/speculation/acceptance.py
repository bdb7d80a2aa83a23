"""AcceptanceEstimate: the probability that drafted tokens of a request are accepted, from its recent drafts.

Each position in a draft has counts of its own: a draft model's later tokens are accepted less often than its first,
even if those before them are accepted. ModelAcceptance keeps the same counts for the drafts of all requests together;
from these, the estimate of a new request begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_WEIGHT = 4.0  # tried tokens that count as much as the proposer's own confidence
DRAFT_POSITION_WEIGHT = 2.0  # tokens tried at one position of drafts that count as much as the estimate for all
MAX_DRAFT_POSITIONS = 8  # positions in a draft with counts of their own; the last one's are for all later ones too
DECAY_PER_STEP = 0.99  # of the weight of a result in ModelAcceptance with each later step
DECAY_PER_TOKEN = 0.97  # of the weight of a result with each later token of the request: half after 23 tokens


@dataclass(slots=True)
class RecentDrafts:
    """Counts of the tokens of one request that were tried and accepted, for each position in a draft.

    Older drafts count less."""

    position: int  # number of the request's tokens when the counts were last updated
    # Tokens that were compared: those that were right, and the first that was wrong.
    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFT_POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFT_POSITIONS)


class AcceptanceEstimate:
    def __init__(self) -> None:
        self._counts: dict[str, RecentDrafts] = {}

    def record(self, request_id: str, position: int, num_draft: int, num_accepted: int) -> None:
        """Record the result of one draft. `position`: number of tokens that the request had before the draft."""
        counts = self._counts.setdefault(request_id, RecentDrafts(position))
        decay = DECAY_PER_TOKEN ** (position - counts.position)
        counts.position = position
        counts.tried = [count * decay for count in counts.tried]
        counts.accepted = [count * decay for count in counts.accepted]
        for index in range(num_accepted):
            counts.tried[min(index, MAX_DRAFT_POSITIONS - 1)] += 1.0
            counts.accepted[min(index, MAX_DRAFT_POSITIONS - 1)] += 1.0
        if num_accepted < num_draft:
            counts.tried[min(num_accepted, MAX_DRAFT_POSITIONS - 1)] += 1.0

    def probabilities(
        self, request_id: str, position: int, confidence: Sequence[float], *, by_draft_position: bool = False
    ) -> list[float]:
        """Return for each drafted token the probability that it and all before it are accepted.

        `confidence`: the proposer's estimate for each token, given that those before it are accepted.
        `by_draft_position`: whether `confidence` was measured for each position in a draft. A token's probability
        then depends on the request's results at the same position only, otherwise also on those at other positions."""
        counts = self._counts.get(request_id)
        probability, found = 1.0, []
        if counts is None:
            for estimate in confidence:
                probability *= estimate
                found.append(probability)
            return found
        decay = DECAY_PER_TOKEN ** (position - counts.position)
        tried, accepted = sum(counts.tried) * decay, sum(counts.accepted) * decay
        for index, estimate in enumerate(confidence):
            here = min(index, MAX_DRAFT_POSITIONS - 1)
            tried_here, accepted_here = counts.tried[here] * decay, counts.accepted[here] * decay
            if by_draft_position:
                probability *= (accepted_here + PRIOR_WEIGHT * estimate) / (tried_here + PRIOR_WEIGHT)
            else:
                of_all = (accepted + PRIOR_WEIGHT * estimate) / (tried + PRIOR_WEIGHT)
                probability *= (accepted_here + DRAFT_POSITION_WEIGHT * of_all) / (tried_here + DRAFT_POSITION_WEIGHT)
            found.append(probability)
        return found

    def forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)


class ModelAcceptance:
    """How often a draft model's tokens are accepted at each position of a draft, in all requests."""

    def __init__(self, max_draft: int, prior: float) -> None:
        """`prior`: the assumed probability before any result.

        The estimate for a position at which no tokens are tried slowly returns to it."""
        self._prior = prior
        self._tried = [0.0] * max_draft
        self._accepted = [0.0] * max_draft

    def record(self, num_draft: int, num_accepted: int) -> None:
        """Record the result of one draft."""
        for index in range(min(num_draft, num_accepted + 1)):
            self._tried[index] += 1.0
            self._accepted[index] += index < num_accepted

    def end_step(self) -> None:
        """Let all results so far count less."""
        self._tried = [count * DECAY_PER_STEP for count in self._tried]
        self._accepted = [count * DECAY_PER_STEP for count in self._accepted]

    def confidence(self, count: int) -> list[float]:
        """Return, by position in a draft, the probability that a token is right if those before it are.

        `count`: number of positions."""
        return [
            (accepted + PRIOR_WEIGHT * self._prior) / (tried + PRIOR_WEIGHT)
            for tried, accepted in zip(self._tried[:count], self._accepted[:count], strict=True)
        ]
