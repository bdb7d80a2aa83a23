"""ResumedOutput: the output that another worker generated for a reply, replayed here to restore the reply's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.handoff import TokenGroup
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason


class ResumedOutput:
    def __init__(self, groups: Sequence[TokenGroup], num_choices: int, vocab_size: int) -> None:
        self._remaining = deque(groups)
        self._tokens: dict[int, list[int]] = {}  # all replayed tokens of each choice
        self._logprobs: dict[int, Iterator[TokenLogprob]] = {}
        for group in groups:
            if group.index >= num_choices or any(token >= vocab_size for token in group.tokens):
                raise InvalidRequest("the handoff does not match the request: a choice or a token id is out of range")
            self._tokens.setdefault(group.index, []).extend(group.tokens)

    def __bool__(self) -> bool:
        return bool(self._remaining)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each choice's index and tokens."""
        return iter(self._tokens.items())

    def tokens_of(self, choices: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of these choices in the form of Submission.resumed; empty if there are none."""
        tokens = tuple(tuple(self._tokens.get(index, ())) for index in choices)
        return tokens if any(tokens) else ()

    def set_logprobs(self, index: int, logprobs: Iterable[TokenLogprob]) -> None:
        """Set the log-probabilities of a choice's tokens, in order: a handoff has tokens only."""
        self._logprobs[index] = iter(logprobs)

    def next_output(self) -> tuple[int, Output]:
        """Return the choice and the engine output of the next group."""
        group = self._remaining.popleft()
        logprobs = list(islice(self._logprobs.get(group.index, iter(())), len(group.tokens)))
        finish = FinishReason(group.finish) if group.finish else None
        return group.index, Output("", tokens=list(group.tokens), logprobs=logprobs, finish=finish)
