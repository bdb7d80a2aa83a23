"""Drafts for models with recurrent states: a step always begins with the states of exactly the accepted tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.engine_config import SchedulerConfig, SpeculationConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import PENDING_TOKEN, StateWork, StepPlan, StepResult, WorkItem
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner
from emberline.engine.speculation.drafter import Drafter
from emberline.engine.speculation.make_drafter import make_drafter
from emberline.kv.state_manager import StateKVManager

SIZE, VOCAB, MAX_RUNNING, MAX_DRAFT = 8, 3, 6, 4  # so few tokens that drafts are often right


class DraftingStateRunner(FakePipelinedRunner):
    """A runner whose states are all tokens before, and whose draft model guesses at random.

    Its own drafts stay on the device, and so does the number of accepted tokens until the next plan was made."""

    def __init__(self, num_blocks: int, num_state_slots: int, rng: random.Random) -> None:
        super().__init__(num_blocks, SIZE, VOCAB)
        self.num_state_slots = num_state_slots
        self.num_accepted = self.num_saved_within = 0
        self._rng = rng
        self._states: list[list[int]] = [[-1]] * num_state_slots
        self._rows: list[list[int]] = [[]] * MAX_RUNNING  # of drafted tokens, by place
        self._accepted: dict[str, int] = {}  # by request: drafted tokens that its newest step accepted
        self._drafts: dict[str, list[int]] = {}  # by request: the newest of the draft model

    def run(self, plan: StepPlan) -> StepResult:
        work = [self._resolve(item) for item in plan.work]
        states = [item.state for item in work if item.state is not None]
        assert len(states) == len(work) == len({state.slot for state in states})
        places = [state.draft_slot for item, state in zip(work, states, strict=True) if item.num_draft]
        assert len(set(places)) == len(places), "two requests keep their rows in one draft slot"
        for state in states:
            if state.load_from is not None:
                self._states[state.slot] = self._states[state.load_from]
        for item, state, planned in zip(work, states, plan.work, strict=True):
            self._advance(item, state, planned.max_shift > 0)
        result = super().run(replace(plan, work=work))
        self._accepted = {w.id: len(result.sampled[w.id].further) for w in work if w.samples}
        self._drafts |= {w.id: [self._rng.randrange(VOCAB) for _ in range(w.num_propose)] for w in work}
        return replace(result, drafted={w.id: [PENDING_TOKEN] * w.num_propose for w in work if w.num_propose})

    def _resolve(self, item: WorkItem) -> WorkItem:
        """Return the item with the tokens and positions that only the device knows."""
        assert item.state is not None
        shift, known = self._accepted[item.id] if item.max_shift else 0, len(item.tokens) - item.num_draft
        tokens = [self._newest_tokens[item.id] if t == PENDING_TOKEN else t for t in item.tokens[:known]]
        draft = list(item.tokens[known:])
        if PENDING_TOKEN in draft:
            draft = self._drafts[item.id][: len(draft)]
        state = replace(item.state, num_accepted=item.state.num_accepted + shift)
        return replace(item, start=item.start + shift, tokens=[*tokens, *draft], state=state)

    def _advance(self, item: WorkItem, state: StateWork, may_end_before: bool) -> None:
        kept = self._states[state.slot] if item.start else []
        before = [*kept, *self._rows[state.draft_slot][: state.num_accepted]]
        cached = [self._memory[item.blocks[p // SIZE] * SIZE + p % SIZE] for p in range(item.start)]
        assert before == cached, "not the states after the tokens before"
        after = [*before, *item.tokens]
        known = len(after) - item.num_draft
        if state.save_to is not None:
            assert len(kept) < state.save_end and state.save_end % SIZE == 0
            assert state.save_end <= known or may_end_before, "the step does not get so far"
            self.num_saved_within += state.save_end <= len(before)
            self._states[state.save_to] = after[: state.save_end] if state.save_end <= known else [-1]
        self._states[state.slot] = after[:known]
        if item.num_draft:
            assert item.num_draft <= MAX_DRAFT
            self._rows[state.draft_slot] = after[known:]
        self.num_accepted += state.num_accepted


def run(engine: Engine, seed: int) -> dict[tuple[str, int], list[int]]:
    rng, tokens = random.Random(seed), {}
    shared = [rng.randrange(VOCAB) for _ in range(80)]

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            tokens.setdefault((output.id, output.index), []).extend(output.tokens)
        engine.kv.check_invariants()

    for number in range(7):
        length, count = rng.randint(1, 90), rng.randint(1, 60)
        prompt = (
            shared[:length] if number % 2 else [*shared[: length // 2], *rng.choices(range(VOCAB), k=length // 2 + 1)]
        )
        params = SamplingParams(
            max_tokens=count, temperature=1.0, seed=number, ignore_eos=True, n=rng.choice([1, 1, 2])
        )
        engine.add(Submission(f"r{number}", prompt, params))
        for _ in range(rng.randint(0, 5)):
            step()
    for _ in range(2000):
        if engine.idle:
            break
        step()
    assert engine.idle
    return tokens


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    blocks=st.integers(24, 90),
    slots=st.integers(1, 12),
    budget=st.sampled_from([16, 64]),
    method=st.sampled_from(["ngram", "on the host", "on the device"]),
)
def test_states_are_those_of_the_accepted_tokens(seed: int, blocks: int, slots: int, budget: int, method: str) -> None:
    config = SchedulerConfig(block_size=SIZE, max_batch_tokens=budget, max_running=MAX_RUNNING, max_context=160)
    expected = run(Engine(config, FakePipelinedRunner(100, SIZE, VOCAB)), seed)
    drafter = make_drafter(SpeculationConfig("ngram", MAX_DRAFT), lambda: None)
    if method != "ngram":
        on_device = method == "on the device"
        drafter = Drafter([], MAX_DRAFT, adaptive=False, uses_draft_model=True, continues_on_device=on_device)
    runner = DraftingStateRunner(blocks, slots, random.Random(seed))
    engine = Engine(config, runner, drafter=drafter)
    assert run(engine, seed) == expected
    assert isinstance(engine.kv, StateKVManager)
    slots_of = engine.kv.states
    assert slots_of.num_free + slots_of.num_snapshots == slots


@pytest.mark.parametrize("on_device", [False, True])
def test_a_boundary_within_accepted_tokens_gets_a_snapshot(on_device: bool) -> None:
    """The next turn of a chat starts behind the answer, wherever the steps that made it ended.

    With drafts on the device, steps are planned before it is known whether they get to the boundary."""
    config = SchedulerConfig(block_size=SIZE, max_batch_tokens=64, max_running=2, max_context=400)
    runner = DraftingStateRunner(100, 8, random.Random(0))
    drafter = make_drafter(SpeculationConfig("ngram", MAX_DRAFT), lambda: None)
    if on_device:
        drafter = Drafter([], MAX_DRAFT, adaptive=False, uses_draft_model=True, continues_on_device=True)
    engine = Engine(config, runner, drafter=drafter)
    prompt, params = [0, 1, 2] * 4, SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    engine.add(Submission("first", prompt, params))
    answer: list[int] = []
    while not engine.idle:
        answer += [token for output in engine.step() for token in output.tokens]
    assert runner.num_accepted > 20 and runner.num_saved_within > 3
    engine.add(Submission("second", [*prompt, *answer, 1], params))
    while not engine.idle:
        engine.step()
    assert engine.kv.hit_tokens >= len(prompt) + len(answer) - 2 * SIZE


def run_alone(engine: Engine, submission: Submission) -> list[int]:
    engine.add(submission)
    tokens = []
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            tokens += output.tokens
        engine.kv.check_invariants()
    return tokens


def test_no_draft_within_the_known_tokens_of_a_resumed_request() -> None:
    """A snapshot ends a chunk one token before a step would be full, so that the next step has a single known token."""
    found = {}
    for budget in (64, 199):
        config = SchedulerConfig(block_size=SIZE, max_batch_tokens=budget, max_running=2, max_context=400)
        drafter = make_drafter(SpeculationConfig("ngram", MAX_DRAFT), lambda: None)
        engine = Engine(config, DraftingStateRunner(100, 8, random.Random(0)), drafter=drafter)
        params = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
        resumed = (tuple(([1, 2, 0] * 67)[:200]),)
        found[budget] = run_alone(engine, Submission("a", [0, 1, 2, 0], params, resumed=resumed))
    assert len(found[64]) == 50 and found[64] == found[199]


def test_both_boundaries_of_a_prompt_get_snapshots_if_steps_are_planned_ahead() -> None:
    config = SchedulerConfig(block_size=SIZE, max_batch_tokens=512, max_running=4, max_context=700)
    engine = Engine(config, DraftingStateRunner(300, 12, random.Random(0)))
    rng, hits = random.Random(1), []
    shared = [rng.randrange(VOCAB) for _ in range(128)]
    first, second = (shared + [rng.randrange(VOCAB) for _ in range(length)] for length in (100, 200))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for name, prompt in (("a", first), ("b", second), ("c", [*second, 1, 2])):
        before = engine.kv.hit_tokens
        run_alone(engine, Submission(name, prompt, params))
        hits.append(engine.kv.hit_tokens - before)
    assert hits == [0, 0, 320]
