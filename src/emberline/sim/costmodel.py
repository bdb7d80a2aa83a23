"""CostModel: estimates the duration of a GPU step from the memory it reads and the tokens it computes."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.plan import StepPlan


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
        context = sum(work.start + len(work.tokens) for work in plan.work)
        return max(self.step, self.token * plan.num_tokens) + self.context * context
