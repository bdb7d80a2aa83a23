"""CostModel: estimates the duration of a GPU step from the memory it reads and the tokens it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from emberline.core.plan import StepPlan


class StepCosts(Protocol):
    """Estimates how long steps take: a CostModel, or a table of measured steps (core/step_costs.py)."""

    @property
    def plans_ahead(self) -> bool:
        """Whether the engine plans a step while the one before it runs, as it does on a GPU."""
        ...

    def estimate_step_seconds(self, plan: StepPlan) -> float: ...

    def step_seconds(
        self, decode_rows: int, decode_context: float, prompt_tokens: int = 0, prompt_pairs: float = 0
    ) -> float:
        """Return the seconds of a step with `decode_rows` decoding requests and chunks of prompts.

        `decode_context`: tokens of context, summed over these requests. `prompt_pairs`: tokens to which a prompt token
        attends, summed over the prompt tokens."""
        ...


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model of the speed of a GPU with three numbers, by default of an H200 with Llama-3.1-8B in bf16.

    The defaults were measured in benchmarks/results/h200-engine.json: a step with one token takes 3.9 ms, and a prompt
    of 8,192 tokens takes 204 ms. The keys and values of one token of context are 128 KiB, which are read at 4.39 TB/s.
    """

    step: float = 3.9e-3  # seconds to read the weights once, and all other fixed costs of a step
    token: float = 24.8e-6  # seconds to multiply one token with all weights
    context: float = 30e-9  # seconds to read the keys and values of one token
    plans_ahead: bool = False

    def estimate_step_seconds(self, plan: StepPlan) -> float:
        """Return the estimated duration of a step.

        The step reads all weights once, while it computes its tokens. After that, each request reads the keys and
        values of its context."""
        return self._seconds(plan.num_tokens, sum(work.start + len(work.tokens) for work in plan.work))

    def step_seconds(
        self, decode_rows: int, decode_context: float, prompt_tokens: int = 0, prompt_pairs: float = 0
    ) -> float:
        """Return the duration of a step.

        The context of a prompt is estimated as twice the mean number of tokens that its tokens attend to."""
        context = 2 * prompt_pairs / prompt_tokens if prompt_tokens else 0.0
        return self._seconds(decode_rows + prompt_tokens, decode_context + context)

    def _seconds(self, tokens: int, context: float) -> float:
        return max(self.step, self.token * tokens) + self.context * context
