"""Proposer: guesses how the tokens of a request continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from emberline.core.request import Request


class Proposal(NamedTuple):
    """Guessed tokens, and for each the estimated probability that it is right if all earlier ones are.

    If they are a draft model's, `confidence` may be longer: it then also covers tokens that the model could add."""

    tokens: Sequence[int]
    confidence: Sequence[float]
    from_model: bool = False

    def is_full_model_draft(self, max_draft: int) -> bool:
        """Return whether a draft model proposed these tokens, and could have proposed `max_draft` tokens."""
        return self.from_model and len(self.confidence) == max_draft


EMPTY_PROPOSAL = Proposal((), ())


class Proposer(Protocol):
    def propose(self, request: Request, limit: int) -> Proposal:
        """Return at most `limit` tokens that may follow the request's tokens."""
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended. A request that was never seen is ignored."""
        ...
