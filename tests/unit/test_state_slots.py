"""StateSlots and StateKVManager: no slot is lost, and a request's slot always has the state of its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.params import SamplingParams
from emberline.core.plan import PENDING_TOKEN, StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.fake import FakeRunner
from emberline.kv.state_manager import StateKVManager
from emberline.kv.state_slots import StateSlots

BLOCK = 8


class FakeStateRunner(FakeRunner):
    """A runner whose states are all tokens before, so that a wrong copy or a reused slot is noticed."""

    def __init__(self, num_blocks: int, num_state_slots: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.num_state_slots = num_state_slots
        self._states: list[list[int]] = [[-1]] * num_state_slots

    def run(self, plan: StepPlan) -> StepResult:
        items = [(work, work.state) for work in plan.work if work.state is not None]
        assert len(items) == len(plan.work) and len({state.slot for _, state in items}) == len(items)
        known = {each.id: each.tokens for each in (*self._admissions.values(), *plan.admitted)}
        for _, state in items:
            if state.load_from is not None:
                self._states[state.slot] = self._states[state.load_from]
        for work, state in items:
            before = self._states[state.slot] if work.start else []
            tokens = known[work.id]
            assert len(before) == work.start, "not the state after the tokens before"
            assert before[: len(tokens)] == tokens[: work.start]
            for position, token in enumerate(before):
                block, offset = divmod(position, BLOCK)
                assert self._memory[work.blocks[block] * BLOCK + offset] == token, "the state of other tokens"
            newest = self._newest_tokens.get(work.id, PENDING_TOKEN)
            after = [newest if token == PENDING_TOKEN else token for token in work.tokens]
            self._states[state.slot] = [*before, *after]
        for _, state in items:
            if state.save_to is not None:
                assert state.save_to not in {other.slot for _, other in items}
                self._states[state.save_to] = self._states[state.slot]
        return super().run(plan)


class PipelinedStateRunner(FakeStateRunner):
    """Runs steps in the order in which they are planned, as a device does, but returns results later."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.run(plan)
        return lambda: result


def make_engine(
    blocks: int, slots: int, *, budget: int = 64, prefix_cache: bool = True, pipelined: bool = False
) -> Engine:
    config = SchedulerConfig(
        block_size=BLOCK, max_batch_tokens=budget, max_running=6, max_context=400, prefix_cache=prefix_cache
    )
    runner = PipelinedStateRunner(blocks, slots) if pipelined else FakeStateRunner(blocks, slots)
    return Engine(config, runner, ManualClock())


def slots_of(engine: Engine) -> StateSlots:
    assert isinstance(engine.kv, StateKVManager)
    return engine.kv.states


def make_prompt(kind: int, length: int) -> list[int]:
    """Return a prompt that shares 80 tokens with all others, and all its tokens with those of the same kind."""
    return [*range(80), *(200 * kind + i % 190 for i in range(400))][:length]


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 4),  # kind of prompt
        st.integers(1, 250),  # its length
        st.integers(1, 60),  # output tokens
        st.integers(1, 3),  # choices
        st.integers(0, 5),  # steps until the next one is added
        st.booleans(),  # whether an earlier one is aborted then
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    blocks=st.integers(45, 160),
    slots=st.integers(1, 14),
    budget=st.sampled_from([16, 64, 300]),
    prefix_cache=st.booleans(),
    pipelined=st.booleans(),
)
def test_every_slot_is_free_or_held_or_a_snapshot(
    requests: Sequence[tuple[int, int, int, int, int, bool]],
    blocks: int,
    slots: int,
    budget: int,
    prefix_cache: bool,
    pipelined: bool,
) -> None:
    engine = make_engine(blocks, slots, budget=budget, prefix_cache=prefix_cache, pipelined=pipelined)
    finished: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            finished[output.id] = finished.get(output.id, 0) + (output.finish is not None)
        engine.kv.check_invariants()

    for i, (kind, length, max_tokens, n, steps, aborts) in enumerate(requests):
        params = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0, seed=i, ignore_eos=True)
        engine.add(Submission(f"r{i}", make_prompt(kind, length), params))
        for _ in range(steps):
            step()
        if aborts:
            engine.abort(f"r{i // 2}")
            engine.kv.check_invariants()
    for _ in range(6000):
        if engine.idle:
            break
        step()
    assert engine.idle and finished == {f"r{i}": each[3] for i, each in enumerate(requests)}
    assert slots_of(engine).num_free + slots_of(engine).num_snapshots == slots


def run(engine: Engine, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Run a request alone, and return how many of its tokens were cached."""
    hits = engine.kv.hit_tokens
    engine.add(Submission(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)))
    while not engine.idle:
        engine.step()
    return engine.kv.hit_tokens - hits


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    engine = make_engine(400, 4)
    prompts = {name: [100 * i + j for j in range(70)] for i, name in enumerate("abcd", 1)}
    assert [run(engine, name, prompts[name]) for name in "abc"] == [0, 0, 0]
    assert run(engine, "a2", prompts["a"]) == 64
    assert run(engine, "d", prompts["d"]) == 0  # takes the slot of b
    assert [run(engine, f"{name}3", prompts[name]) for name in "adcb"] == [64, 64, 64, 0]


def test_a_snapshot_without_its_blocks_is_dropped() -> None:
    engine = make_engine(12, 8)
    run(engine, "a", list(range(70)))
    assert slots_of(engine).num_snapshots == 1
    run(engine, "b", [500 + i for i in range(90)])  # evicts blocks of a, the last first
    assert slots_of(engine).num_snapshots == 1
    assert run(engine, "a2", list(range(70))) == 0
    assert slots_of(engine).num_free + slots_of(engine).num_snapshots == 8


@pytest.mark.parametrize("pipelined", [False, True])
def test_outputs_keep_one_snapshot_each(pipelined: bool) -> None:
    engine = make_engine(100, 8, pipelined=pipelined)
    run(engine, "a", list(range(30)), max_tokens=100)
    assert slots_of(engine).num_snapshots == 1
    run(engine, "b", [500 + i for i in range(100)], max_tokens=30)
    assert slots_of(engine).num_snapshots == 3  # also one of the prompt


def test_the_last_slot_of_a_snapshot_is_taken_over() -> None:
    engine = make_engine(100, 1)
    prompt = list(range(70))
    run(engine, "a", prompt)
    slots = slots_of(engine)
    slots.admit("x", None)
    assert slots.plan_snapshot("x", b"h", 64, replaces=False) is None, "there is no slot for it"
    slots.free("x")
    pair = StateSlots(2)
    pair.admit("a", None)
    target = pair.plan_snapshot("a", b"h", 64, replaces=False)
    assert target is not None and pair.longest_prefix([b"g", b"h"]) == 0, "it is not made yet"
    pair.commit_snapshot("a", 64)
    assert pair.longest_prefix([b"g", b"h", b"i"]) == 2
    pair.admit("b", b"h")
    assert pair.slot_of("b") == target and pair.take_load("b") is None and not pair.can_admit
    pair.check_invariants()


def test_a_snapshot_stays_until_it_was_copied() -> None:
    slots = StateSlots(3)
    slots.admit("a", None)
    slots.plan_snapshot("a", b"h", 8, replaces=False)
    slots.commit_snapshot("a", 8)
    slots.admit("b", b"h")
    assert not slots.can_admit
    slots.forget_prefix(b"h")
    source = slots.take_load("b")
    assert source is not None and source not in (slots.slot_of("a"), slots.slot_of("b"))
    assert slots.can_admit and slots.take_load("b") is None
    slots.forget_prefix(b"h")
    assert slots.num_free == 1
    slots.check_invariants()


def test_a_snapshot_that_another_request_used_is_not_replaced() -> None:
    slots = StateSlots(6)
    slots.admit("a", None)
    for number, (digest, kept) in enumerate([(b"1", 1), (b"2", 1), (b"3", 2)], 1):
        slots.plan_snapshot("a", digest, 8 * number, replaces=True)
        slots.commit_snapshot("a", 8 * number)
        assert slots.num_snapshots == kept
        if number == 2:
            slots.admit("b", digest)
            slots.take_load("b")
    assert [slots.longest_prefix([digest]) for digest in (b"1", b"2", b"3")] == [0, 1, 1]
    slots.check_invariants()


@pytest.mark.parametrize("computed", [7, 8])
def test_a_snapshot_of_an_ended_step_is_found(computed: int) -> None:
    slots = StateSlots(2)
    slots.admit("a", None)
    slots.plan_snapshot("a", b"h", 8, replaces=True)
    slots.commit_snapshot("a", computed)
    assert slots.longest_prefix([b"h"]) == (computed == 8)
    slots.free("a")
    slots.check_invariants()
    assert slots.num_snapshots == (computed == 8)
