"""DraftedCosts: step costs with speculative decoding, for a simulator whose requests get one token in each step."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.plan import StepPlan
from emberline.core.step_costs import sum_work
from emberline.planner.measured_figures import DRAFTED_STEPS, DRAFTS_FILE, DRAFTS_SHAPE, MAX_DRAFT_TOKENS
from emberline.sim.costmodel import StepCosts

MEASURED_CONTEXT = 640  # mean tokens of a request in the measured steps


@dataclass(frozen=True, slots=True)
class DraftedCosts:
    """Step costs with drafts, for a simulator whose steps generate one token for each request.

    A real step generates `tokens_per_step` tokens for a request, so the time for decoding is divided by that number.
    For batches that are larger than the measured ones, the costs are those without drafts."""

    base: StepCosts
    step_ms: tuple[tuple[int, float], ...]  # rows, milliseconds of a step with drafts
    tokens_per_step: float
    source: str = DRAFTS_FILE
    plans_ahead: bool = True

    def step_seconds(
        self, decode_rows: int, decode_context: float, prompt_tokens: int = 0, prompt_pairs: float = 0.0
    ) -> float:
        whole = self.base.step_seconds(decode_rows, decode_context, prompt_tokens, prompt_pairs)
        if not 0 < decode_rows <= self.step_ms[-1][0]:  # drafts were not measured with larger batches
            return whole
        alone = self.base.step_seconds(decode_rows, decode_context)
        return whole - alone * (1.0 - self._time_share(decode_rows))

    def estimate_step_seconds(self, plan: StepPlan) -> float:
        return self.step_seconds(*sum_work(plan.work))

    def _time_share(self, rows: int) -> float:
        """Return the time per token with drafts, divided by the time without drafts, for batches of `rows` requests."""
        points = self.step_ms
        right = next(i for i, (batch, _) in enumerate(points) if rows <= batch)
        (low, first), (high, second) = points[max(0, right - 1)], points[right]
        step_ms = second if low == high else first + (second - first) * (rows - low) / (high - low)
        plain_ms = 1e3 * self.base.step_seconds(rows, rows * MEASURED_CONTEXT)
        return min(1.0, step_ms / self.tokens_per_step / plain_ms)


def find_drafted_costs(base: StepCosts, shape: str, weights: str, tokens_per_step: float) -> DraftedCosts | None:
    """Return the step costs if each step generates `tokens_per_step` tokens for a request.

    Return None if steps with drafts were not measured for this shape and these weights."""
    if shape != DRAFTS_SHAPE or weights not in DRAFTED_STEPS:
        return None
    assert 1.0 <= tokens_per_step <= 1 + MAX_DRAFT_TOKENS
    points = tuple((step.batch, step.ms_per_token * step.tokens_per_step) for step in DRAFTED_STEPS[weights])
    return DraftedCosts(base, points, tokens_per_step)
