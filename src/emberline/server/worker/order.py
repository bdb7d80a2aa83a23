"""PreparedCall: the prompts and parameters of one call as the engine takes them, and how to read its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberline.api.call import Caller
from emberline.api.splitter import Splitter
from emberline.core.params import SamplingParams
from emberline.server.worker.choice import Choice


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit of the reasoning, and how the reply continues after the server has closed it."""

    tokens: int
    closing: list[int]  # tokens of the marker that ends the reasoning
    after: SamplingParams  # for the answer

    def spent(self, choice: Choice, tokens: list[int]) -> bool:
        """Return whether the choice has used up the budget.

        A marker that the model has just written does not count: the detokenizer may still hold it back as the
        beginning of a stop string, so that the choice does not see it yet.
        """
        is_closed = tokens[-len(self.closing) :] == self.closing
        return choice.thinking and choice.reasoning_tokens >= self.tokens and not is_closed


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, with choices [first_choice, first_choice + n)."""

    ids: list[int]
    first: int
    echo: bool = False
    budget: Budget | None = None  # only for a single prompt with one choice


@dataclass(frozen=True, slots=True)
class Order:
    jobs: Sequence[Job]
    params: SamplingParams
    caller: Caller
    splitter: Callable[[int], Splitter | None]  # takes the index of a choice
    kept: frozenset[int]  # special tokens that the text includes
    continuing: bool  # the output continues the prompt's text
    running_usage: bool
    return_token_ids: bool = False
    ends: frozenset[int] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.ids) for job in self.jobs)

    def job_of(self, index: int) -> Job:
        """Return the prompt that this choice belongs to."""
        return self.jobs[index // self.params.n]
