"""DraftOracle: a proposer for tests that knows the output of each request and makes mistakes on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emberline.core.request import Request
from emberline.engine.speculation.proposer import Proposal


class DraftOracle:
    """Proposes the expected output of a request, with a wrong token wherever `right` is False; `right` is repeated.

    Behind the end of the output it proposes tokens that never come."""

    def __init__(
        self, expected: Mapping[tuple[str, int], Sequence[int]], right: Sequence[bool] = (True,), vocab_size: int = 256
    ) -> None:
        """`expected`: the output of each completion, by submission id and index."""
        self.forgotten: list[str] = []  # ids of requests that ended
        self._expected = expected
        self._right = right
        self._vocab_size = vocab_size

    def propose(self, request: Request, limit: int) -> Proposal:
        at = len(request.tokens) - request.prompt_len
        future = [*self._expected[request.submission_id, request.index][at:], *range(limit)][:limit]
        tokens = [
            token if self._right[(at + i) % len(self._right)] else (token + 1) % self._vocab_size
            for i, token in enumerate(future)
        ]
        return Proposal(tokens, [1.0] * len(tokens))

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.id)
