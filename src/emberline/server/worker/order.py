"""Order: what the engine is asked for one call, and how its tokens are to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberline.api.call import Caller
from emberline.api.splitter import Splitter
from emberline.core.params import SamplingParams
from emberline.server.worker.choice import Choice


@dataclass(frozen=True, slots=True)
class Budget:
    """How long the reasoning may be, and how the reply goes on once it was closed for the model."""

    tokens: int
    closing: list[int]
    after: SamplingParams

    def spent(self, choice: Choice, said: list[int]) -> bool:
        """A marker that the model wrote itself may be held back still, as the beginning of a stop string."""
        closed = said[-len(self.closing) :] == self.closing
        return choice.thinking and choice.reasoning_tokens >= self.tokens and not closed


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the choices it gets: [first, first + n)."""

    ids: list[int]
    first: int
    echo: bool = False
    budget: Budget | None = None  # then it is the only job, with one choice


@dataclass(frozen=True, slots=True)
class Order:
    jobs: Sequence[Job]
    params: SamplingParams
    caller: Caller
    splitter: Callable[[int], Splitter | None]  # of a choice
    kept: frozenset[int]  # special tokens that are shown nevertheless
    continuing: bool  # the text goes on from the prompt's
    running_usage: bool
    return_token_ids: bool = False
    ends: frozenset[int] = frozenset()  # the model's own end tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.ids) for job in self.jobs)

    def job_of(self, index: int) -> Job:
        """Whose choice this is."""
        return self.jobs[index // self.params.n]
