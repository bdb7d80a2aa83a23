"""Cost models estimate the duration of a GPU step. CostModel does so from the memory read and the tokens computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from emberline.core.plan import StepPlan


class StepCostModel(Protocol):
    def estimate_step_seconds(self, plan: StepPlan) -> float:
        """Return the estimated duration of a step with work."""
        ...


@runtime_checkable
class BatchCostModel(StepCostModel, Protocol):
    """A cost model that needs only sums over a step's work, so that a run of steps can be estimated at once."""

    def estimate_batch_seconds(self, rows: int, prompt_tokens: int, context: int) -> float:
        """Return the estimated duration of a step.

        `rows`: requests that decode one token. `prompt_tokens`: tokens of all prompt chunks. `context`: tokens of all
        requests, decoding or not, up to the end of their work in this step."""
        ...


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model of the speed of a GPU, by default of an H200 with Llama-3.1-8B in bf16.

    The defaults were measured in benchmarks/results/h200-engine.json: a step with one token takes 3.9 ms, and a prompt
    of 8,192 tokens takes 203 ms. The keys and values of one token of context are 128 KiB, which are read at 4.39 TB/s.
    """

    step: float = 3.9e-3  # seconds to read the weights once, and all other fixed costs of a step
    token: float = 24.8e-6  # seconds to multiply one token with all weights
    context: float = 30e-9  # seconds to read the keys and values of one token

    def estimate_step_seconds(self, plan: StepPlan) -> float:
        """Return the estimated duration of a step.

        The step reads all weights once, while it computes its tokens. After that, each request reads the keys and
        values of its context."""
        return self.estimate_batch_seconds(0, plan.num_tokens, sum(w.start + len(w.tokens) for w in plan.work))

    def estimate_batch_seconds(self, rows: int, prompt_tokens: int, context: int) -> float:
        return max(self.step, self.token * (rows + prompt_tokens)) + self.context * context
