"""NgramProposer: guesses that the newest tokens of a request continue as they did when they occurred before in it."""

from __future__ import annotations

from emberline.core.request import Request
from emberline.engine.speculation.proposer import EMPTY_PROPOSAL, Proposal

MIN_LENGTH = 2  # tokens that must match
MAX_LENGTH = 4  # tokens that are compared
CONFIDENCE = {2: 0.5, 3: 0.7, 4: 0.8}  # by number of matching tokens, before anything is known about the request


class NgramProposer:
    def __init__(self) -> None:
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, request: Request, limit: int) -> Proposal:
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = NgramIndex()
        index.extend(request.tokens)
        end, length = index.find_continuation(request.tokens)
        if not length:
            return EMPTY_PROPOSAL
        copied = request.tokens[end : end + limit]
        tokens = (copied * -(-limit // len(copied)))[:limit]  # at the end of the text, what was copied goes on
        return Proposal(tokens, [CONFIDENCE[length]] * limit)

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.id, None)


class NgramIndex:
    """The newest position of each sequence of 2 to 4 tokens in one text, except those that end the text."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._size = 0  # sequences that end before this position are in the index

    def extend(self, tokens: list[int]) -> None:
        for end in range(max(self._size, MIN_LENGTH), len(tokens)):
            for length in range(MIN_LENGTH, min(MAX_LENGTH, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._size = max(self._size, len(tokens))

    def find_continuation(self, tokens: list[int]) -> tuple[int, int]:
        """Return the position after the newest earlier occurrence of the last tokens, and how many match; 0: none."""
        for length in range(min(MAX_LENGTH, len(tokens)), MIN_LENGTH - 1, -1):
            if (end := self._ends.get(tuple(tokens[-length:]))) is not None:
                return end, length
        return 0, 0
