"""NgramProposer: guesses that the newest tokens of a request continue as they did when they occurred before.

Earlier occurrences are looked up in the request itself and in the prediction that the client sent."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.request import Request
from emberline.engine.speculation.proposer import EMPTY_PROPOSAL, Proposal

MIN_LENGTH = 2  # tokens that must match
MAX_LENGTH = 4  # tokens that are compared
END_OF_PREDICTION = -1  # no token: nothing matches across it
CONFIDENCE = {2: 0.5, 3: 0.7, 4: 0.8}  # by number of matching tokens, before anything is known about the request


class NgramProposer:
    def __init__(self) -> None:
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, request: Request, limit: int) -> Proposal:
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = NgramIndex(request.prediction)
        index.extend(request.tokens)
        return index.propose(limit)

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.id, None)


class NgramIndex:
    """An index of where each sequence of 2 to 4 tokens of a request has occurred last.

    The sequences at the very end are not indexed, so that a lookup finds only earlier occurrences. The indexed text is
    the request's prediction, then its tokens."""

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._text = [*prediction, END_OF_PREDICTION] if prediction else []
        self._start = len(self._text)  # position of the request's first token
        self._ends: dict[tuple[int, ...], int] = {}
        self._size = 0  # sequences that end before this position are in the index

    def extend(self, tokens: list[int]) -> None:
        """Add the tokens of the request that are new since the last call."""
        self._text += tokens[len(self._text) - self._start :]
        for end in range(max(self._size, MIN_LENGTH), len(self._text)):
            for length in range(MIN_LENGTH, min(MAX_LENGTH, end) + 1):
                self._ends[tuple(self._text[end - length : end])] = end
        self._size = max(self._size, len(self._text))

    def propose(self, limit: int) -> Proposal:
        """Return at most `limit` tokens that followed the newest earlier occurrence of the last tokens, if any."""
        end, length = self._find_continuation()
        if not length:
            return EMPTY_PROPOSAL
        copied = self._text[end : end + limit]
        if end < self._start and END_OF_PREDICTION in copied:
            tokens = copied[: copied.index(END_OF_PREDICTION)]
        else:
            tokens = (copied * -(-limit // len(copied)))[:limit]  # if it reaches the end of the text, it is repeated
        return Proposal(tokens, [CONFIDENCE[length]] * len(tokens))

    def _find_continuation(self) -> tuple[int, int]:
        """Return the position after the newest earlier occurrence of the last tokens, and how many of them match.

        Return (0, 0) if there is none."""
        for length in range(min(MAX_LENGTH, len(self._text) - self._start), MIN_LENGTH - 1, -1):
            if (end := self._ends.get(tuple(self._text[-length:]))) is not None:
                return end, length
        return 0, 0
