"""CostModel: estimates how long a GPU takes for a step, from memory traffic and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class CostModel:
    """The defaults describe an H200 with Llama-3.1-8B in bf16, from benchmarks/results/h200-engine.json.

    A step of one row takes 3.9 ms, 8,192 tokens of a prompt 203 ms, and a token of context is 128 KiB at 4.39 TB/s."""

    step: float = 3.9e-3  # seconds to read the weights once, and all other fixed costs of a step
    token: float = 24.8e-6  # seconds to multiply one token with all weights
    context: float = 30e-9  # seconds to read the keys and values of one token

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds that a plan takes.

        Weights are read once, in parallel with arithmetic; each request also reads its own context."""
        context = sum(work.start + len(work.tokens) for work in plan.work)
        return max(self.step, self.token * plan.num_tokens) + self.context * context
