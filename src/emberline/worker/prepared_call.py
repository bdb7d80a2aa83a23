"""PreparedCall: the prompts and parameters of one call as the engine takes them, and how to read its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emberline.api.call import CommonFields
from emberline.api.output_parser import OutputParser
from emberline.core.params import SamplingParams
from emberline.worker.choice import Choice


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """The limit of the reasoning, and how the reply continues after the server has closed it."""

    max_tokens: int
    closing_tokens: list[int]  # tokens of the marker that ends the reasoning
    params_after: SamplingParams  # for the answer

    def is_spent(self, choice: Choice, tokens: list[int]) -> bool:
        """Return whether the choice has used up the budget.

        A marker that the model has just written does not count: the detokenizer may still hold it back as the
        beginning of a stop string, so that the choice does not see it yet.
        """
        is_closed = tokens[-len(self.closing_tokens) :] == self.closing_tokens
        return choice.in_reasoning and choice.reasoning_tokens >= self.max_tokens and not is_closed


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, with choices [first_choice, first_choice + n)."""

    token_ids: list[int]
    first_choice: int
    echo: bool = False
    budget: ReasoningBudget | None = None  # only for a single prompt with one choice


@dataclass(frozen=True, slots=True)
class PreparedCall:
    prompts: Sequence[PreparedPrompt]
    params: SamplingParams
    common: CommonFields
    make_parser: Callable[[int], OutputParser | None]  # takes the index of a choice
    visible_special_tokens: frozenset[int]  # special tokens that the text includes
    continues_prompt: bool  # the output continues the prompt's text
    running_usage: bool
    return_token_ids: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.token_ids) for job in self.prompts)

    def prompt_of(self, choice_index: int) -> PreparedPrompt:
        """Return the prompt that this choice belongs to."""
        return self.prompts[choice_index // self.params.n]
