"""Past: what a reply has said elsewhere, group by group. It is gone through again, so that all stands as it stood."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.handoff import Said
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason


class Past:
    def __init__(self, said: Sequence[Said], choices: int, vocab_size: int) -> None:
        self._left = deque(said)
        self._tokens: dict[int, list[int]] = {}  # all that each choice has said
        self._scores: dict[int, Iterator[TokenLogprob]] = {}
        for group in said:
            if group.index >= choices or any(token >= vocab_size for token in group.tokens):
                raise InvalidRequest("the handoff is of another request: it has a choice or a token too many")
            self._tokens.setdefault(group.index, []).extend(group.tokens)

    def __bool__(self) -> bool:
        return bool(self._left)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """What each choice has said."""
        return iter(self._tokens.items())

    def resumed(self, choices: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """As a Submission of these has it."""
        said = tuple(tuple(self._tokens.get(index, ())) for index in choices)
        return said if any(said) else ()

    def score(self, index: int, logprobs: Iterable[TokenLogprob]) -> None:
        """Of the choice's tokens, in order: only tokens travel."""
        self._scores[index] = iter(logprobs)

    def next(self) -> tuple[int, Output]:
        """The next group: which choice, and what the engine put out."""
        group = self._left.popleft()
        logprobs = list(islice(self._scores.get(group.index, iter(())), len(group.tokens)))
        finish = FinishReason(group.finish) if group.finish else None
        return group.index, Output("", tokens=list(group.tokens), logprobs=logprobs, finish=finish)
