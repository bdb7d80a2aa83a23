"""PromptPacer: prompt chunks are as large as the target of the streams allows, which it learns from steps."""

from __future__ import annotations

import pytest
from gpu_settings import gpu_config
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import ITL_TAIL, EngineConfig, SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakeRunner
from emberline.engine.pacing import MAX_LATE_TOKENS, MIN_PROMPT_TOKENS, TOKENS_PER_LATE_TOKEN, PromptPacer

TAIL = 1.5


@settings(max_examples=60, deadline=None)
@given(base=st.floats(0.002, 0.015), per_token=st.floats(5e-6, 60e-6), target=st.floats(0.02, 0.06))
def test_pacer_learns_the_chunk_that_meets_the_target(base: float, per_token: float, target: float) -> None:
    pacer = PromptPacer(target, TAIL)
    for step in range(200):
        chunk = 0 if step % 4 == 0 else pacer.prompt_token_budget(8) or 0
        pacer.record_step_time(chunk, base + per_token * chunk)
    chunk = pacer.prompt_token_budget(8)
    assert chunk is not None
    wanted = (target - base) / per_token
    assert chunk == MIN_PROMPT_TOKENS or abs(chunk - wanted) <= 0.1 * wanted + 128


def test_no_streams_means_no_limit_and_a_missed_target_still_makes_progress() -> None:
    assert PromptPacer(0.03, TAIL).prompt_token_budget(0) is None
    assert PromptPacer(1e-6, TAIL).prompt_token_budget(5) == MIN_PROMPT_TOKENS


class TimedRunner(FakeRunner):
    """A runner whose steps take time in proportion to their tokens."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(4000, 16)
        self._clock = clock
        self.seconds: list[float] = []

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        seconds = 0.004 + 20e-6 * plan.num_tokens
        self._clock.advance(seconds)
        self.seconds.append(seconds)
        return StepResult(result.step, result.sampled, result.prompt_logprobs, seconds=seconds)


@pytest.mark.parametrize(("target", "tail"), [(None, ITL_TAIL), (0.02, 1.5), (0.02, 4.0)])
def test_stream_continues_beside_a_long_prompt(target: float | None, tail: float) -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)
    config = SchedulerConfig(
        max_batch_tokens=8192, max_context=32_768, itl_target_ms=target and 1e3 * target, itl_tail=tail
    )
    engine = Engine(config, runner, clock)
    engine.add(Submission("stream", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)))
    for _ in range(10):
        engine.step()
    engine.add(Submission("long", list(range(900)) * 30, SamplingParams(max_tokens=1)))
    while not engine.idle:
        engine.step()
    took = sorted(runner.seconds)
    if target is None:
        assert took[-1] > 0.15
        return
    assert 0.8 * tail * target < took[-1] < 1.05 * tail * target
    assert sum(t > 1.2 * target for t in took) <= len(took) / TOKENS_PER_LATE_TOKEN + 1


def budgets(pacer: PromptPacer, steps: int, waited: float, streams: int = 50) -> list[int]:
    """Return the budgets of steps that use all of them."""
    allowed = []
    for _ in range(steps):
        allowed.append(pacer.prompt_token_budget(streams, waited) or 0)
        pacer.record_plan(allowed[-1])
    return allowed


def test_prompts_that_waited_long_get_longer_steps() -> None:
    pacer = PromptPacer(0.03, TAIL)
    (usual,) = budgets(pacer, 1, waited=0.0)
    assert budgets(pacer, 600, waited=0.2) == [usual] * 600, "no prompt has waited for long"
    burst = budgets(pacer, 100, waited=0.3)
    row = MAX_LATE_TOKENS // 50
    assert all(grant > 1.3 * usual for grant in burst[:row]), "what was saved is used up at once"
    assert sum(grant > usual for grant in burst) <= row + 100 / TOKENS_PER_LATE_TOKEN, "and then they come one by one"
    assert 6 <= sum(grant > usual for grant in budgets(pacer, 100, waited=0.3)) <= 8


def test_late_tokens_are_counted_not_steps() -> None:
    """Steps with few streams save few late tokens for steps with many."""
    pacer = PromptPacer(0.03, TAIL)
    usual = pacer.prompt_token_budget(50)
    budgets(pacer, 100, waited=0.0, streams=2)
    assert pacer.prompt_token_budget(50, 0.3) == usual


def test_unused_long_step_is_not_counted() -> None:
    """A request that waits for a free row does not make steps longer."""
    pacer = PromptPacer(0.03, TAIL)
    usual = pacer.prompt_token_budget(50)
    assert usual is not None
    for _ in range(600):
        pacer.prompt_token_budget(50, 5.0)
        pacer.record_plan(0)
    assert all(grant > usual for grant in budgets(pacer, MAX_LATE_TOKENS // 50, waited=5.0))


def test_many_streams_get_long_steps_too() -> None:
    pacer = PromptPacer(0.03, TAIL)
    usual = pacer.prompt_token_budget(2 * MAX_LATE_TOKENS) or 0
    assert any(grant > usual for grant in budgets(pacer, 50, waited=5.0, streams=2 * MAX_LATE_TOKENS))


def test_tail_without_a_target_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="itl_tail"):
        EngineConfig.build("m", itl_tail=2.0)
    with pytest.raises(InvalidRequest, match="itl_tail"):
        gpu_config(itl_target_ms=30.0, itl_tail=0.5)
