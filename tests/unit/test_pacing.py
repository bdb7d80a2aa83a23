"""Pacing of prompts beside streams: chunks that meet a target, and bursts that leave most tokens on time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from gpu_settings import gpu_config
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import (
    GPU_SCHEDULER_DEFAULTS,
    ITL_TAIL,
    EngineConfig,
    SchedulerConfig,
)
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakeRunner
from emberline.engine.pacing import (
    MAX_BURST_SECONDS,
    MAX_LATE_TOKENS,
    MIN_PROMPT_TOKENS,
    TOKENS_PER_LATE_TOKEN,
    NoPacing,
    PromptBursts,
    TargetPacing,
    make_pacing,
)
from emberline.sim.costs import find_cost_table
from emberline.sim.runners import make_sim_runner

TAIL = 1.5
H200 = find_cost_table("h200", "llama-8b", "plain")


@settings(max_examples=60, deadline=None)
@given(base=st.floats(0.002, 0.015), per_token=st.floats(5e-6, 60e-6), target=st.floats(0.02, 0.06))
def test_pacer_learns_the_chunk_that_meets_the_target(base: float, per_token: float, target: float) -> None:
    pacer = TargetPacing(target, TAIL)
    for step in range(200):
        chunk = 0 if step % 4 == 0 else pacer.max_prompt_tokens(8) or 0
        pacer.record_step_time(chunk, base + per_token * chunk)
    chunk = pacer.max_prompt_tokens(8)
    assert chunk is not None
    wanted = (target - base) / per_token
    assert chunk == MIN_PROMPT_TOKENS or abs(chunk - wanted) <= 0.1 * wanted + 128


def test_no_streams_means_no_limit_and_a_missed_target_still_makes_progress() -> None:
    assert TargetPacing(0.03, TAIL).max_prompt_tokens(0) is None
    assert TargetPacing(1e-6, TAIL).max_prompt_tokens(5) == MIN_PROMPT_TOKENS


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


def budgets(pacer: TargetPacing, steps: int, waited: float, streams: int = 50) -> list[int]:
    """Return the budgets of steps that use all of them."""
    allowed = []
    for _ in range(steps):
        allowed.append(pacer.max_prompt_tokens(streams, waited) or 0)
        pacer.record_plan(allowed[-1])
    return allowed


def test_prompts_that_waited_long_get_longer_steps() -> None:
    pacer = TargetPacing(0.03, TAIL)
    (usual,) = budgets(pacer, 1, waited=0.0)
    assert budgets(pacer, 600, waited=0.2) == [usual] * 600, "no prompt has waited for long"
    burst = budgets(pacer, 100, waited=0.3)
    row = MAX_LATE_TOKENS // 50
    assert all(grant > 1.3 * usual for grant in burst[:row]), "what was saved is used up at once"
    assert sum(grant > usual for grant in burst) <= row + 100 / TOKENS_PER_LATE_TOKEN, "and then they come one by one"
    assert 6 <= sum(grant > usual for grant in budgets(pacer, 100, waited=0.3)) <= 8


def test_late_tokens_are_counted_not_steps() -> None:
    """Steps with few streams save few late tokens for steps with many."""
    pacer = TargetPacing(0.03, TAIL)
    usual = pacer.max_prompt_tokens(50)
    budgets(pacer, 100, waited=0.0, streams=2)
    assert pacer.max_prompt_tokens(50, 0.3) == usual


def test_unused_long_step_is_not_counted() -> None:
    """A request that waits for a free row does not make steps longer."""
    pacer = TargetPacing(0.03, TAIL)
    usual = pacer.max_prompt_tokens(50)
    assert usual is not None
    for _ in range(600):
        pacer.max_prompt_tokens(50, 5.0)
        pacer.record_plan(0)
    assert all(grant > usual for grant in budgets(pacer, MAX_LATE_TOKENS // 50, waited=5.0))


def test_many_streams_get_long_steps_too() -> None:
    pacer = TargetPacing(0.03, TAIL)
    usual = pacer.max_prompt_tokens(2 * MAX_LATE_TOKENS) or 0
    assert any(grant > usual for grant in budgets(pacer, 50, waited=5.0, streams=2 * MAX_LATE_TOKENS))


def test_tail_without_a_target_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="itl_tail"):
        EngineConfig.build("m", itl_tail=2.0)
    with pytest.raises(InvalidRequest, match="itl_tail"):
        gpu_config(itl_target_ms=30.0, itl_tail=0.5)


class OpenLoop:
    """Streams and long prompts on an engine whose steps take the time of a GPU's."""

    def __init__(self, num_blocks: int = 40_000, **settings: Any) -> None:
        self.clock = ManualClock()
        runner = make_sim_runner(num_blocks, H200, self.clock)
        config = SchedulerConfig(
            **GPU_SCHEDULER_DEFAULTS | {"block_size": 16, "max_context": 32_768, "prefix_cache": False} | settings
        )
        self.engine = Engine(config, runner, self.clock)
        self.token_times: dict[str, list[float]] = {}
        self.prompts: dict[str, float] = {}

    def add(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        prompt = [hash((name, i)) % 1000 for i in range(prompt_tokens)]
        self.engine.add(Submission(name, prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True)))
        self.prompts[name] = self.clock.time

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error is None
            self.token_times.setdefault(output.id, []).extend([self.clock.time] * len(output.tokens))

    def run(self, arrivals: Sequence[tuple[float, str]], prompt_tokens: int, output_tokens: int) -> None:
        pending = deque(arrivals)
        while pending or not self.engine.idle:
            while pending and pending[0][0] <= self.clock.time:
                self.add(pending.popleft()[1], prompt_tokens, output_tokens)
            if self.engine.idle:
                self.clock.time = pending[0][0]
            self.step()

    @property
    def gaps(self) -> list[float]:
        return sorted(b - a for times in self.token_times.values() for a, b in pairwise(times))

    @property
    def waits(self) -> list[float]:
        return sorted(times[0] - self.prompts[name] for name, times in self.token_times.items())


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def test_bursts_keep_nine_of_ten_tokens_on_time_and_delay_no_prompt() -> None:
    """Prompts of 4,096 tokens take three quarters of an H200's time."""
    rng = random.Random(77)
    arrivals, at = [], 0.0
    for index in range(100):
        at += rng.expovariate(8.0)
        arrivals.append((at, str(index)))
    loops = {bursts: OpenLoop(prompt_bursts=bursts) for bursts in (False, True)}
    for loop in loops.values():
        loop.run(arrivals, 4096, 256)
    without, with_bursts = loops[False], loops[True]
    assert quantile(without.gaps, 0.9) > 0.08, "the load is heavy enough to show the difference"
    assert quantile(with_bursts.gaps, 0.9) < 0.02
    assert quantile(with_bursts.waits, 0.9) < 1.1 * quantile(without.waits, 0.9)
    assert with_bursts.clock.time < 1.02 * without.clock.time


def test_burst_ends_although_prompts_never_do() -> None:
    loop = OpenLoop(prompt_bursts=True)
    loop.add("stream", 3, 400)
    for _ in range(20):
        loop.step()
    for index in range(30):
        loop.add(f"long{index}", 8000, 1)
    while not loop.engine.idle:
        loop.step()
    last_steps = 0.15  # the step in which the time is over, and the one that has been planned ahead
    gaps = [b - a for a, b in pairwise(loop.token_times["stream"])]
    assert 0.8 * MAX_BURST_SECONDS < max(gaps) < MAX_BURST_SECONDS + last_steps


def test_streams_go_on_while_no_prompt_can_start() -> None:
    """The cache is full of streams: a prompt that waits for blocks must not stop them."""
    loop = OpenLoop(num_blocks=40, prompt_bursts=True)
    loop.add("stream", 300, 200)
    for _ in range(3):
        loop.step()
    loop.add("waits", 500, 2)
    steps = 0
    while not loop.engine.idle:
        loop.step()
        steps += 1
    assert len(loop.token_times["stream"]) == 200
    assert len(loop.token_times["waits"]) == 2
    assert steps < 220


def test_prompts_of_few_tokens_never_make_streams_wait() -> None:
    loop = OpenLoop(prompt_bursts=True)
    loop.add("stream", 3, 300)
    for index in range(100):
        loop.add(f"short{index}", 100, 1)
        loop.step()
    assert loop.gaps[-1] < 0.017


def test_bursts_are_the_default_on_a_gpu_only() -> None:
    assert isinstance(make_pacing(SchedulerConfig(), 1), NoPacing)
    gpu = SchedulerConfig(**GPU_SCHEDULER_DEFAULTS)
    assert isinstance(make_pacing(gpu, 1), PromptBursts)
    assert isinstance(make_pacing(gpu, 2), NoPacing), "stages compute other streams' tokens meanwhile"
    assert isinstance(make_pacing(SchedulerConfig(**GPU_SCHEDULER_DEFAULTS, itl_target_ms=20.0), 1), TargetPacing)
