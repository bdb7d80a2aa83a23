"""PredictionProposer: guesses that the output is the prediction that the client sent with its request."""

from __future__ import annotations

from emberline.core.request import Request
from emberline.engine.speculation.proposer import EMPTY_PROPOSAL, Proposal

CONFIDENCE = 0.8  # before anything is known about the request


class PredictionProposer:
    """Proposes the rest of the prediction while the output so far is a prefix of it.

    After the output differs, the other proposers look for later matches in the prediction."""

    def __init__(self) -> None:
        self._matched: dict[str, int] = {}  # by request: output tokens that equal the beginning of its prediction

    def propose(self, request: Request, limit: int) -> Proposal:
        prediction, start = request.prediction, request.prompt_len
        if not prediction:
            return EMPTY_PROPOSAL
        matched, end = self._matched.get(request.id, 0), min(request.output_len, len(prediction))
        while matched < end and request.tokens[start + matched] == prediction[matched]:
            matched += 1
        self._matched[request.id] = matched
        if matched < request.output_len:
            return EMPTY_PROPOSAL
        tokens = prediction[matched : matched + limit]
        return Proposal(tokens, [CONFIDENCE] * len(tokens))

    def forget(self, request: Request) -> None:
        self._matched.pop(request.id, None)
