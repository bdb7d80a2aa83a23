"""ResumedOutput: the output that a different worker generated for a reply which continues here.

It is replayed to restore the state of the detokenizer and the parsers.
"""

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
                raise InvalidRequest(
                    "the handoff from another worker does not match the request: a choice or a token id is out of range"
                )
            self._tokens.setdefault(group.index, []).extend(group.tokens)

    def __bool__(self) -> bool:
        return bool(self._remaining)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the index and the tokens of each choice."""
        return iter(self._tokens.items())

    def tokens_of(self, choice_indexes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each choice in `choice_indexes`, or () if none of them has tokens.

        The result is the value of Submission.resumed."""
        tokens = tuple(tuple(self._tokens.get(index, ())) for index in choice_indexes)
        return tokens if any(tokens) else ()

    def set_logprobs(self, choice_index: int, logprobs: Iterable[TokenLogprob]) -> None:
        """Set the log-probabilities of a choice's tokens. The tokens came from another worker without them."""
        self._logprobs[choice_index] = iter(logprobs)

    def next_output(self) -> tuple[int, Output]:
        """Return the index of a choice and the next output of that choice to replay.

        The output has the form of an engine output."""
        group = self._remaining.popleft()
        logprobs = list(islice(self._logprobs.get(group.index, iter(())), len(group.tokens)))
        finish = FinishReason(group.finish) if group.finish else None
        return group.index, Output("", tokens=list(group.tokens), logprobs=logprobs, finish=finish)
