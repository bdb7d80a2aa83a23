"""PreparedPrompt: the token ids and sampling parameters of a prompt, and how to parse the engine's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emberline.api.output_parser import OutputParser
from emberline.core.params import SamplingParams
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.choice import Choice


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """The limit of reasoning tokens, after which the server ends the reasoning and the answer begins."""

    max_tokens: int
    closing_tokens: list[int]  # tokens of the marker that ends the reasoning
    params_after: SamplingParams  # for the answer

    def is_spent(self, choice: Choice, tokens: list[int]) -> bool:
        """Return whether the choice has reached the limit within its reasoning. `tokens` is its output.

        The last tokens are compared with the marker that ends the reasoning. The choice itself may not have seen the
        marker yet, because the detokenizer keeps text that may be the start of a stop string.
        """
        is_closed = tokens[-len(self.closing_tokens) :] == self.closing_tokens
        return choice.in_reasoning and choice.reasoning_tokens >= self.max_tokens and not is_closed


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    token_ids: list[int]
    params: SamplingParams  # equal for all prompts of a request; params.n choices are generated from each prompt
    first_choice: int = 0  # index in the request of this prompt's first choice
    echo: bool = False  # the reply includes the prompt
    prediction: tuple[int, ...] = ()  # tokens that the client expects as the output
    budget: ReasoningBudget | None = None  # only for a single prompt with one choice
    make_parser: Callable[[int], OutputParser | None]  # takes the index of a choice; None: the output is plain text
    visible_special_tokens: frozenset[int]  # special tokens that the text includes
    continues_prompt: bool  # the output continues the prompt's text
    return_token_ids: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def choice_indexes(self) -> range:
        return range(self.first_choice, self.first_choice + self.params.n)

    def make_choices(self, tokenizer: Tokenizer) -> list[Choice]:
        return [
            Choice(
                index,
                tokenizer,
                self.params,
                self.make_parser(index),
                visible_special_tokens=self.visible_special_tokens,
                continues_prompt=self.continues_prompt,
                eos_token_ids=self.eos_token_ids,
                prompt_ids=self.token_ids if self.return_token_ids else None,
            )
            for index in self.choice_indexes
        ]
