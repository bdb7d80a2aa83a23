"""Speculative decoding: drafts, right or wrong, never change the tokens, and are chosen by what they gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draft_oracle import DraftOracle
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output, SpeculationStats, Stats
from emberline.core.params import SamplingParams
from emberline.core.plan import SampledToken, StepPlan, StepResult, WorkItem
from emberline.core.request import Request, Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.engine.speculation.acceptance import AcceptanceEstimate
from emberline.engine.speculation.draft_length import choose_lengths
from emberline.engine.speculation.draft_switch import SKIPPED_STEPS, DraftSwitch
from emberline.engine.speculation.drafter import Drafter
from emberline.engine.speculation.ngram import NgramProposer
from emberline.engine.speculation.proposer import Proposal
from emberline.engine.speculation.step_cost import StepCost

BLOCK = 8


class ScriptedProposer:
    """Proposes what the test's function returns for a request, with full confidence."""

    def __init__(self, guess: Callable[[Request, int], Sequence[int]]) -> None:
        self._guess = guess

    def propose(self, request: Request, limit: int) -> Proposal:
        tokens = self._guess(request, limit)
        return Proposal(tokens, [1.0] * len(tokens))

    def forget(self, request: Request) -> None:
        pass


def make_engine(
    drafter: Drafter | None,
    *,
    blocks: int = 400,
    budget: int = 1000,
    running: int = 16,
    prefix_cache: bool = True,
    runner: type[FakeRunner] = FakeRunner,
    eos: frozenset[int] = frozenset(),
) -> Engine:
    config = SchedulerConfig(block_size=BLOCK, max_batch_tokens=budget, max_running=running, prefix_cache=prefix_cache)
    return Engine(config, runner(blocks, BLOCK, eos=eos), ManualClock(), drafter=drafter)


def run(e: Engine) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(10_000):
        outputs += e.step()
        e.kv.check_invariants()
        if e.idle:
            return outputs
    raise AssertionError("the engine did not finish")


def texts(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    folded: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        folded.setdefault((output.id, output.index), []).extend(output.tokens)
    return folded


def submission(name: str, length: int = 20, start: int = 0, **params: object) -> Submission:
    return Submission(name, [(start + i) % 1000 for i in range(length)], SamplingParams(**params))  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(1, 40), st.integers(1, 3)),
        min_size=1,
        max_size=6,
    ),
    blocks=st.integers(16, 40),
    budget=st.integers(4, 64),
    running=st.integers(1, 4),
    prefix=st.booleans(),
    gap=st.integers(0, 3),
    runner=st.sampled_from([FakeRunner, FakePipelinedRunner]),
    eos=st.sampled_from([frozenset[int](), frozenset(range(0, 1000, 7))]),
    right=st.lists(st.booleans(), min_size=1, max_size=7),
    max_draft=st.integers(1, 9),
)
def test_drafts_never_change_the_tokens(
    work: list[tuple[int, int, int, int]],
    blocks: int,
    budget: int,
    running: int,
    prefix: bool,
    gap: int,
    runner: type[FakeRunner],
    eos: frozenset[int],
    right: list[bool],
    max_draft: int,
) -> None:
    submissions = [
        submission(f"r{i}", length, start, max_tokens=out, n=n, seed=i, stop_token_ids=(999, 500 + i))
        for i, (length, start, out, n) in enumerate(work)
    ]
    expected: dict[tuple[str, int], list[int]] = {}
    for s in submissions:
        alone = make_engine(None, eos=eos)
        alone.add(s)
        expected |= texts(run(alone))
    drafter = Drafter([DraftOracle(expected, right, 1000)], max_draft, adaptive=False)
    e = make_engine(
        drafter,
        blocks=blocks,
        budget=max(budget, running),
        running=running,
        prefix_cache=prefix,
        runner=runner,
        eos=eos,
    )
    outputs: list[Output] = []
    for s in submissions:
        e.add(s)
        for _ in range(gap):
            outputs += e.step()
            e.kv.check_invariants()
    outputs += run(e)
    assert texts(outputs) == expected
    assert Counter((o.id, o.index) for o in outputs if o.finish) == Counter(expected.keys())
    assert e.kv.num_free_blocks + e.kv.num_cached_blocks == e.kv.num_blocks
    assert not e.scheduler.requests


@pytest.mark.parametrize("runner", [FakeRunner, FakePipelinedRunner])
def test_right_drafts_take_fewer_steps(runner: type[FakeRunner]) -> None:
    alone = make_engine(None)
    alone.add(submission("a", max_tokens=60, temperature=0.0))
    expected = texts(run(alone))
    proposer = DraftOracle(expected)
    drafter = Drafter([proposer], 4, adaptive=False)
    e = make_engine(drafter, runner=runner)
    e.add(submission("a", max_tokens=60, temperature=0.0))
    assert texts(run(e)) == expected
    assert e.runner.steps <= 2 + 60 / 5 + 1  # type: ignore[attr-defined]
    assert drafter.accepted_tokens == drafter.drafted_tokens > 40
    assert proposer.forgotten == ["a#0"]


@pytest.mark.parametrize("runner", [FakeRunner, FakePipelinedRunner])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_outputs_and_stats_count_drafted_and_accepted_tokens(runner: type[FakeRunner], logprobs: int | None) -> None:
    alone = make_engine(None)
    alone.add(submission("a", max_tokens=30, n=2, seed=1))
    plain = run(alone)
    assert {(o.drafted_tokens, o.accepted_tokens) for o in plain} == {(0, 0)} and alone.stats().speculation is None
    drafter = Drafter([DraftOracle(texts(plain), [True, True, True, False])], 4, adaptive=False)
    e = make_engine(drafter, runner=runner)
    e.add(submission("a", max_tokens=30, n=2, seed=1, logprobs=logprobs))
    outputs = run(e)
    assert all(o.accepted_tokens <= o.drafted_tokens for o in outputs)
    assert all(len(o.tokens) == 1 + o.accepted_tokens for o in outputs if o.finish is None)
    drafted, accepted = [o.drafted_tokens for o in outputs], [o.accepted_tokens for o in outputs]
    for index in range(2):
        counts = [(o.drafted_tokens, o.accepted_tokens) for o in outputs if o.index == index]
        assert 0 < sum(right for _, right in counts) < sum(tried for tried, _ in counts)
    stats = e.stats().speculation
    assert stats is not None and (sum(drafted), sum(accepted)) == (stats.drafted_tokens, stats.accepted_tokens)
    assert len(stats.accepted_per_position) == 4 and sum(stats.accepted_per_position) == stats.accepted_tokens
    assert stats.drafts >= stats.accepted_per_position[0] >= stats.accepted_per_position[1] > 0


def test_aborted_request_reports_its_drafts() -> None:
    e = make_engine(Drafter([ScriptedProposer(lambda request, limit: [1] * limit)], 3, adaptive=False))
    e.add(submission("a", max_tokens=100))
    outputs = [output for _ in range(5) for output in e.step()]
    e.abort("a")
    outputs += run(e)
    assert outputs[-1].finish and sum(o.drafted_tokens for o in outputs) >= 9
    assert not any(o.accepted_tokens for o in outputs)


def test_speculation_stats_are_summed_over_engines() -> None:
    one, two = SpeculationStats(2, 6, 3, [2, 1]), SpeculationStats(1, 3, 3, [1, 1, 1])
    total = Stats.total([Stats(speculation=one), Stats(), Stats(speculation=two)]).speculation
    assert total == SpeculationStats(3, 9, 6, [3, 2, 1])
    assert Stats.total([Stats()]).speculation is None


def test_accepted_tokens_enter_the_prefix_cache() -> None:
    alone = make_engine(None)
    alone.add(submission("a", 16, max_tokens=33, temperature=0.0))
    expected = texts(run(alone))
    e = make_engine(Drafter([DraftOracle(expected)], 4, adaptive=False))
    e.add(submission("a", 16, max_tokens=33, temperature=0.0))
    run(e)
    e.add(Submission("b", [*range(16), *expected["a", 0]], SamplingParams(max_tokens=1)))
    found = [o.cached_tokens for o in run(e) if o.cached_tokens]
    assert found == [48]


def test_draft_never_preempts_a_request() -> None:
    """Blocks for drafts are taken only while every running request could still get one more."""
    drafter = Drafter([ScriptedProposer(lambda request, limit: [1] * limit)], 30, adaptive=False)
    e = make_engine(drafter, blocks=8, running=2)
    for name in "ab":
        e.add(submission(name, 15, start=100 * ord(name), max_tokens=17))
    run(e)
    assert e.scheduler.preemptions == 0


def test_ngram_continues_the_newest_occurrence_of_the_longest_match() -> None:
    proposer = NgramProposer()

    def propose(tokens: list[int], limit: int = 3) -> list[int]:
        e = make_engine(None)
        e.add(Submission("x", tokens, SamplingParams()))
        request = e.scheduler.requests["x#0"]
        proposer.forget(request)
        return list(proposer.propose(request, limit).tokens)

    assert propose([1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert propose([1, 2, 3, 1, 2, 9, 7, 1, 2]) == [9, 7, 1]
    assert propose([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2]) == [3, 9, 1]
    assert propose([1, 2, 3, 4]) == []
    assert propose([1, 1, 1, 1]) == [1, 1, 1]
    assert propose([7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert propose([1]) == []


def test_lengths_follow_probability_and_cost() -> None:
    probabilities = {"a": [0.9, 0.8], "b": [0.5, 0.1]}
    assert choose_lengths(probabilities, 2, 4, np.ones(5)) == {"a": 2, "b": 2}
    assert choose_lengths(probabilities, 2, 3, np.ones(4)) == {"a": 2, "b": 1}
    assert choose_lengths(probabilities, 2, 4, np.arange(2.0, 7.0)) == {}  # a step takes as long as it has tokens
    # Each token costs a third of a row: only drafts above that probability pay.
    assert choose_lengths(probabilities, 2, 4, 1 + 0.3 * np.arange(5)) == {"a": 2}
    assert choose_lengths({}, 2, 4, np.ones(5)) == {}


def test_acceptance_learns_and_forgets() -> None:
    estimate = AcceptanceEstimate()
    before = estimate.probabilities("a", 10, [0.8, 0.8])
    assert before == pytest.approx([0.8, 0.64])
    for position in range(10, 20):
        estimate.record("a", position, 2, 0)
    wrong = estimate.probabilities("a", 20, [0.8, 0.8])
    assert wrong[0] < 0.3
    assert estimate.probabilities("a", 320, [0.8])[0] == pytest.approx(0.8, abs=0.01)
    assert estimate.probabilities("b", 20, [0.8]) == pytest.approx([0.8])


def test_acceptance_differs_by_place_in_the_draft() -> None:
    """The first two tokens of each draft are right, the others never: only the first two are worth verifying."""
    estimate = AcceptanceEstimate()
    for position in range(10, 40, 3):
        estimate.record("a", position, 4, 2)
    probabilities = estimate.probabilities("a", 40, [0.7] * 12)
    assert probabilities[1] > 0.8 and probabilities[2] < 0.2
    assert len(probabilities) == 12 and probabilities == sorted(probabilities, reverse=True)
    assert choose_lengths({"a": probabilities}, 1, 12, 1 + 0.25 * np.arange(13)) == {"a": 2}
    for position in range(40, 160, 13):  # now whole drafts of 12 tokens are right
        estimate.record("a", position, 12, 12)
    assert estimate.probabilities("a", 160, [0.7] * 12)[-1] > 0.5


def make_request_of_model_drafts(name: str, max_len: int = 99) -> Any:
    return SimpleNamespace(
        id=name, can_draft=True, allows_drafts=True, num_planned=9, prompt_len=5, num_known=10, num_draft=0,
        max_len=max_len, num_pending=0, num_proposing=0, can_continue_on_device=False, prediction=(),
        params=SamplingParams(), num_drafted=0, num_accepted=0,
    )  # fmt: skip


def plan_model_drafts(drafter: Drafter, request: Any, proposed: int) -> tuple[int, int]:
    """Return how many of the proposed tokens a step verifies, and how many the draft model proposes behind it."""
    kv: Any = SimpleNamespace(extend_block_table=lambda *args, **kwargs: True)
    drafter._drafted[request.id] = list(range(proposed))
    drafts = drafter.plan_drafts([request], 9, kv)
    num_draft = len(drafts.get(request.id, ()))
    return num_draft, drafter.plan_proposals([(request, 1 + num_draft)], drafts, kv)[request.id]


def make_model_drafter(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Return a drafter for which each verified token takes a tenth of a step."""
    drafter = Drafter([], 4, uses_draft_model=True)
    monkeypatch.setattr(drafter, "is_on", lambda rows: True)
    for tokens in range(1, 6):
        drafter._cost.record(tokens, 0.9 + 0.1 * tokens)
    return drafter


def test_a_draft_model_proposes_as_many_tokens_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two tokens of each draft are right, the others never; other requests benefit from what one showed."""
    drafter = make_model_drafter(monkeypatch)
    assert plan_model_drafts(drafter, make_request_of_model_drafts("first"), 4) == (4, 4)
    for i in range(12):
        request = make_request_of_model_drafts(f"r{i}")
        num_draft, _ = plan_model_drafts(drafter, request, 4)
        work = WorkItem(request.id, 9, [1, *range(num_draft)], [0], samples=True, num_draft=num_draft)
        drafter.record_result(request, work, SampledToken(0, further=[SampledToken(1), SampledToken(77)]), 3)
        drafter.forget(request)
    new = make_request_of_model_drafts("new")
    assert plan_model_drafts(drafter, new, 4) == (2, 2)
    assert plan_model_drafts(drafter, new, 1) == (1, 2)  # two are worth verifying, but one was proposed
    for _ in range(400):  # steps in which no third token is tried
        drafter.record_step(StepPlan(0, (), (), ()), StepResult(0, {}), 0.0, ())
    assert plan_model_drafts(drafter, new, 2) == (2, 4)


def test_a_request_that_ends_soon_does_not_shorten_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_model_drafter(monkeypatch)
    assert plan_model_drafts(drafter, make_request_of_model_drafts("a", max_len=12), 4) == (1, 1)
    assert plan_model_drafts(drafter, make_request_of_model_drafts("b"), 4) == (4, 4)
    assert drafter._num_propose == 4


def test_step_cost_interpolates_and_tries_larger_steps() -> None:
    cost = StepCost()
    assert cost.estimate(3, 2).tolist() == [1.0, 1.0]
    for seconds in (1.0, 9.0, 1.0):  # one step was disturbed
        cost.record(1, seconds)
    cost.record(5, 3.0)
    assert cost.estimate(1, 5).tolist() == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert 3.0 < cost.estimate(8, 1)[0] < 3.3


def test_a_change_of_one_step_size_is_assumed_for_all() -> None:
    """Steps of 3 tokens were measured after a long prompt, while clocks were low, and must be tried again."""
    cost = StepCost()
    for seconds in (2.0, 2.0):
        cost.record(3, seconds)
    cost.record(4, 2.2)
    for _ in range(3):
        cost.record(4, 1.1)
    assert cost.estimate(3, 2).tolist() == pytest.approx([1.0, 1.1])
    for _ in range(3):
        cost.record(3, 1.05)
    assert cost.estimate(3, 2).tolist() == pytest.approx([1.05, 1.155])


def test_a_slow_draft_model_of_a_fast_model_is_switched_off() -> None:
    """The time between results has the draft model's passes, although it is several times the step's own time."""
    drafter, now, was_on = Drafter([], 4, uses_draft_model=True), 0.0, []
    for position in range(200):
        was_on.append(drafter.is_on(1))
        now += 0.0025 if was_on[-1] else 0.0008
        draft = [2] if was_on[-1] else []
        work = WorkItem("a", position, [1, *draft], [0], samples=True, num_draft=len(draft))
        sampled = SampledToken(2, further=[SampledToken(3)] if draft else [])
        drafter.record_step(StepPlan(0, (), (work,), ()), StepResult(0, {"a": sampled}, seconds=0.0007), now, {"a"})
    assert 2 < sum(was_on) < 30 and not any(was_on[60:])


def test_a_draft_model_is_judged_by_requests_whose_tokens_it_has_computed() -> None:
    """After a time without drafts the model does not know the running request, so a trial waits for the next one."""
    drafter, now = Drafter([], 4, uses_draft_model=True), 0.0

    def run(name: str, start: int, tokens: int) -> tuple[bool, bool]:
        nonlocal now
        work = WorkItem(name, start, [1] * tokens, [0], samples=True)
        plan = drafter.complete_plan(StepPlan(0, (), (work,), ()))
        is_on = drafter.is_on(1)
        now += 0.005 if is_on else 0.001
        drafter.record_step(plan, StepResult(0, {name: SampledToken(2)}, seconds=0.001), now, {name})
        return is_on, plan.runs_draft_model

    assert run("a", 0, 30) == (False, True)  # the prompt, although drafts are off while steps are measured
    steps = [run("a", 30 + i, 1) for i in range(600)]
    assert steps[0] == (False, False) and steps[11] == (True, True)  # the trial, in the same request
    assert steps[-1] == (True, False)  # a second trial waits
    assert run("b", 0, 30) == (True, True)
    assert [run("b", 30 + i, 1) for i in range(3)] == [(True, True)] * 3
    assert not any([run("b", 33 + i, 1)[0] for i in range(20)][10:])  # the trial has ended


def test_measured_steps_include_the_experts_that_their_rows_touch() -> None:
    """Rows of a mixture of experts read other experts each, so that drafts that pay in a dense model do not there."""
    likely, chosen = {"a": [0.7, 0.5, 0.35, 0.25]}, {}
    for name, experts in (("dense", 1), ("sparse", 64)):
        drafter = Drafter([], 4, uses_draft_model=True)
        for num_draft in (0, 4, 2, 1, 3):
            touched = experts * (1 - (1 - min(8 / experts, 1.0)) ** (1 + num_draft))  # by rows that choose 8 at random
            work = WorkItem("a", 5, [1] * (1 + num_draft), [0], samples=True, num_draft=num_draft)
            result = StepResult(0, {"a": SampledToken(2)}, seconds=0.001 * (1 + touched))
            drafter.record_step(StepPlan(0, (), (work,), ()), result, 0.0, {"a"})
        chosen[name] = choose_lengths(likely, 1, 4, drafter._cost.estimate(1, 5))
    assert chosen == {"dense": {"a": 4}, "sparse": {}}


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_drafts_are_tried_once_in_batches_of_any_size(requests: int) -> None:
    """With one sampled token of each request measured only, whole drafts seem worth their cost."""
    cost, likely = StepCost(), [0.7, 0.5, 0.35, 0.25]
    cost.record(requests, 0.006)
    room = len(likely) * requests
    chosen = choose_lengths(
        {str(i): likely for i in range(requests)}, requests, room, cost.estimate(requests, room + 1)
    )
    assert chosen == {str(i): len(likely) for i in range(requests)}


def test_numbers_of_drafted_tokens_are_multiples_of_the_grain() -> None:
    likely, seconds = {"a": [0.9, 0.8, 0.7], "b": [0.6, 0.2, 0.1]}, np.array([1.0, 1.1, 1.2, 1.3, 3.0, 3.1, 3.2])
    assert choose_lengths(likely, 2, 6, seconds) == {"a": 3}
    assert choose_lengths(likely, 2, 6, seconds, grain=2) == {"a": 2}
    assert choose_lengths(likely, 2, 6, seconds, grain=4) == {}  # 4 or 6 tokens would take too long
    assert choose_lengths({"a": [0.9]}, 2, 6, seconds, grain=4) == {"a": 1}


def test_steps_that_wait_for_a_capture_are_not_measured() -> None:
    drafter = Drafter([], 4, uses_draft_model=True)
    work = WorkItem("a", 5, [1], [0], samples=True)
    # The capture is for the third step, which is launched before the second result is read.
    for num_prepared, seconds in ((0, 1.0), (3, 2.0), (3, 50.0), (3, 1.0), (3, 1.0)):
        result = StepResult(0, {"a": SampledToken(2)}, seconds=seconds, num_prepared=num_prepared)
        drafter.record_step(StepPlan(0, (), (work,), ()), result, 0.0, {"a"})
    assert drafter._cost.estimate(1, 1).tolist() == [1.0]
    assert drafter._switch._periods[1].steps == 3 - SKIPPED_STEPS


@pytest.mark.parametrize("seconds_with_drafts", [0.9, 1.1])
def test_switch_keeps_the_faster_way(seconds_with_drafts: float) -> None:
    """Both ways make as many tokens; one of them takes longer. The slower one is tried again ever less often."""
    switch, on_steps = DraftSwitch(), []
    for _ in range(20_000):
        is_on = switch.is_on(5)
        on_steps.append(is_on)
        switch.record(5, 8, seconds_with_drafts if is_on else 1.0)
    share = sum(on_steps) / len(on_steps)
    assert share > 0.97 if seconds_with_drafts < 1 else share < 0.02
    assert switch.is_on(64)  # other sizes of batches are measured on their own, and drafts are tried first


def test_switch_ends_a_trial_that_clearly_loses() -> None:
    switch, trials = DraftSwitch(), []
    for _ in range(250):
        if is_on := switch.is_on(5):
            trials.append(is_on)
        switch.record(5, 5, 2.0 if is_on else 1.0)
    assert len(trials) <= 18 + 7  # the first one has nothing to be compared with


def test_drafts_of_a_model_are_tried_after_steps_without_them() -> None:
    """A draft model that clearly does not pay costs a few steps only, and is kept up to date while it is measured."""
    switch, trials = DraftSwitch(starts_on=False), []
    assert not switch.is_on(5) and switch.is_measuring(5)
    for _ in range(250):
        if is_on := switch.is_on(5):
            trials.append(is_on)
        switch.record(5, 5, 2.0 if is_on else 1.0)
    assert 0 < len(trials) <= 7 and not switch.is_measuring(5)


def test_cost_of_a_step_includes_the_time_to_plan_it() -> None:
    drafter = Drafter([], 4)
    plan = StepPlan(1, (), [WorkItem("a", 5, [7], [0], samples=True)], ())
    for now in (10.3, 10.6, 10.9, 99.0):  # then the engine was idle
        drafter.record_step(plan, StepResult(1, {}, seconds=0.2), now, {"r"})
    scale = drafter._cost._scale
    assert [scale * sample for sample in drafter._cost._samples[1]] == pytest.approx([0.3, 0.3, 0.2])
