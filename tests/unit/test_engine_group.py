"""EngineGroup: when models are woken, how long requests wait, and that every request ends exactly once."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from fake_sleep import FakeSleeper

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig, TimeSharingConfig
from emberline.core.errors import (
    DeadlineExceeded,
    EmberlineError,
    EngineFailed,
    EngineUnavailable,
    ModelNotFound,
    Overloaded,
)
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine import engine_group
from emberline.engine.engine import Engine
from emberline.engine.engine_group import EngineGroup, StepReport
from emberline.engine.fake import FakePipelinedRunner, FakeRunner


@dataclass
class FakeModel(FakeSleeper):
    """A model whose engine asserts that it is not used while asleep."""

    is_pipelined: bool = False

    def __post_init__(self) -> None:
        model = self

        class Runner(FakePipelinedRunner if self.is_pipelined else FakeRunner):  # type: ignore[misc]
            def run(self, plan: StepPlan) -> StepResult:
                assert model.awake, f"{model.name} was used in its sleep"
                result: StepResult = super().run(plan)
                return result

        config = SchedulerConfig(max_batch_tokens=64, max_running=4, max_waiting=8, max_context=64)
        self.engine = Engine(config, Runner(), self.clock)

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def wake(self) -> int:
        assert not self.awake
        self.change_state("wake", True)
        return self.nbytes

    def sleep(self) -> int:
        assert self.awake and self.idle
        self.change_state("sleep", False)
        return self.nbytes


@dataclass
class GroupHarness:
    memory: int
    sizes: dict[str, int]
    rules: TimeSharingConfig = field(default_factory=lambda: TimeSharingConfig(model_turn=5.0, model_wait=60.0))
    is_pipelined: bool = False
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        self.clock, self.log = ManualClock(100.0), list[str]()
        self.models = {
            name: FakeModel(name, size, self.clock, self.log, is_pipelined=self.is_pipelined)
            for name, size in self.sizes.items()
        }
        self.group = EngineGroup(self.models, self.memory, self.rules, self.clock, max_waiting=self.max_waiting)
        del self.log[:]
        self.tokens: dict[str, list[int]] = {}
        self.endings: Counter[str] = Counter()
        self.timings: dict[str, float] = {}
        self.rejected: dict[str, EmberlineError] = {}
        self.open: dict[str, int] = {}  # completions that have not ended
        self.reports: list[StepReport] = []

    def submit_one(self, model: str, tokens: int = 3, n: int = 1, timeout: float = 600.0) -> str:
        name = f"{model}{len(self.open)}"
        params = SamplingParams(max_tokens=tokens, n=n, temperature=0.0)
        self.group.add(Submission(name, [len(self.open) % 50 + 1, 2, 3], params, timeout=timeout, model=model))
        self.open[name] = n
        return name

    def step(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        report = self.group.step()
        self.reports.append(report)
        for model, outputs in report.outputs.items():
            for output in outputs:
                assert output.id.startswith(model)
                self.take(output)
        for name, error in report.rejected:
            assert self.open[name] > 0 and name not in self.tokens
            self.rejected[name], self.open[name] = error, 0
        awake = [model for model in self.models.values() if model.awake]
        assert sum(model.nbytes for model in awake) <= self.memory
        assert {model.name for model in awake} == {name for name in self.models if self.group.is_awake(name)}

    def take(self, output: Output) -> None:
        assert self.open[output.id] > 0 or not output.tokens
        self.tokens.setdefault(output.id, []).extend(output.tokens)
        if output.finish is not None:
            self.open[output.id] -= 1
            self.endings[output.id] += 1
            assert output.timing is not None
            self.timings[output.id] = output.timing.arrival

    def finish(self) -> None:
        for _ in range(1000):
            if self.group.idle:
                break
            self.step()
        assert self.group.idle and not any(self.open.values())

    @property
    def awake(self) -> list[str]:
        return [name for name, model in self.models.items() if model.awake]


def two_models(model_turn: float = 5.0, model_wait: float = 60.0, max_waiting: int = 1024) -> GroupHarness:
    return GroupHarness(10, {"a": 10, "b": 8}, TimeSharingConfig(model_turn, model_wait), max_waiting=max_waiting)


def test_all_models_are_loaded_and_the_first_is_awake() -> None:
    clock, log = ManualClock(), list[str]()
    models = {name: FakeModel(name, 10, clock, log) for name in "abc"}
    group = EngineGroup(models, 10, TimeSharingConfig(), clock)
    assert log == ["wake c", "sleep c", "wake b", "sleep b", "wake a"]
    assert list(group.engines) == ["a", "b", "c"] and group.is_awake("a") and not group.is_awake("b")
    assert group.step().sleep_changes == {"a", "b", "c"} and group.step().sleep_changes == set()
    models = {name: FakeModel(name, 10, clock, log) for name in "abc"}
    models["b"].fails = RuntimeError("torn file")
    with pytest.raises(RuntimeError, match="torn file"):
        EngineGroup(models, 10, TimeSharingConfig(), clock)


def test_unknown_model_is_rejected() -> None:
    harness = two_models()
    with pytest.raises(ModelNotFound, match=r"'z'.*a b"):
        harness.submit_one("z")
    harness.finish()


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_request_wakes_its_model_and_least_recently_used_ones_sleep(is_pipelined: bool) -> None:
    harness = GroupHarness(20, {"a": 10, "b": 10, "c": 10}, is_pipelined=is_pipelined)
    harness.step()
    assert harness.awake == ["a", "b"]  # c was loaded first
    harness.submit_one("a")
    harness.submit_one("b")
    harness.finish()
    harness.step()  # the runner receives the ended ids
    harness.step()
    name = harness.submit_one("c")
    harness.step()
    assert harness.log == ["sleep a", "wake c"] and harness.reports[-1].sleep_changes == {"a", "c"}
    assert set(harness.reports[-1].outputs) >= {"a", "c"}
    harness.finish()
    assert len(harness.tokens[name]) == 3 and harness.endings[name] == 1
    assert (harness.group.sleep_stats("a").sleeps, harness.group.sleep_stats("c").wakes) == (1, 2)


def test_each_sleep_and_each_wake_counts_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have to wait until several others sleep, which together may take longer than the stall timeout."""
    harness = GroupHarness(20, {"a": 10, "b": 10, "c": 20})
    harness.step()
    counts, change_state = [harness.group.progress_count()], FakeModel.change_state

    def count(model: FakeModel, change: str, awake: bool) -> None:
        change_state(model, change, awake)
        counts.append(harness.group.progress_count())

    monkeypatch.setattr(FakeModel, "change_state", count)
    harness.submit_one("c")
    harness.finish()
    assert harness.log == ["sleep b", "sleep a", "wake c"]
    assert [each - counts[0] for each in counts] == [0, 0, 1, 2]  # counted when a change is complete


def test_tokens_equal_those_of_a_model_alone() -> None:
    harness = two_models()
    names = [harness.submit_one(model, tokens=4) for model in "abab"]
    harness.finish()
    for name in names:
        alone = GroupHarness(10, {name[0]: 10})
        alone.open = {str(i): 0 for i in range(names.index(name))}  # the same prompt
        assert alone.submit_one(name[0], tokens=4) == name
        alone.finish()
        assert alone.tokens[name] == harness.tokens[name]


def test_busy_model_runs_for_its_turn_then_drains_and_sleeps() -> None:
    harness = two_models()
    harness.step(10.0)  # a has been awake for more than a turn
    first, other = harness.submit_one("a", tokens=20), harness.submit_one("b")
    harness.step(4.9)
    late = harness.submit_one("a", tokens=2)
    harness.step()
    assert late in harness.tokens, "it still takes requests"
    harness.step(0.2)  # b has waited for one turn
    waiting_id = harness.submit_one("a", tokens=2)
    while harness.open[first]:
        assert harness.awake == ["a"] and waiting_id not in harness.tokens
        harness.step()
    harness.step()
    assert harness.log == ["sleep a", "wake b"]
    harness.finish()
    assert harness.log == ["sleep a", "wake b", "sleep b", "wake a"]
    assert all(harness.endings[name] == 1 for name in (first, late, other, waiting_id)) and not harness.rejected


def test_busy_model_is_not_drained_if_idle_ones_are_enough() -> None:
    harness = GroupHarness(20, {"a": 10, "b": 10, "c": 10})
    going = harness.submit_one("a", tokens=30)
    harness.submit_one("b", tokens=1)
    harness.step()
    harness.submit_one("c")
    harness.step()
    assert harness.log == ["sleep b", "wake c"] and harness.open[going]  # though a was used less recently
    harness.finish()


def test_model_that_just_woke_gets_its_turn() -> None:
    """This holds however long others have waited, or two busy models would only swap."""
    harness = two_models()
    harness.step(10.0)
    harness.submit_one("a", tokens=20)
    harness.submit_one("b", tokens=50)
    harness.step(6.0)
    waiting = harness.submit_one("a", tokens=2)
    while harness.awake != ["b"]:
        harness.step(0.5)
    harness.step(4.0)  # a has waited for more than a turn
    quick = harness.submit_one("b", tokens=2)
    harness.step()
    assert quick in harness.tokens and waiting not in harness.tokens
    harness.step(1.5)
    waiting_id = harness.submit_one("b", tokens=2)
    harness.step()
    assert waiting_id not in harness.tokens
    harness.finish()
    assert not harness.rejected


def test_model_that_is_no_longer_draining_continues_at_once() -> None:
    harness = GroupHarness(10, {"a": 10, "b": 10, "c": 10})
    harness.submit_one("a", tokens=40)
    gone = harness.submit_one("b")
    harness.step(6.0)
    harness.submit_one("c")  # a need not sleep for this one yet
    waiting_id = harness.submit_one("a", tokens=1)
    harness.step()
    assert waiting_id not in harness.tokens
    harness.group.abort(gone)
    harness.step()
    harness.step()
    assert waiting_id in harness.tokens
    harness.finish()


def test_constant_load_on_one_model_does_not_starve_another() -> None:
    harness = two_models()
    waits = []
    for _ in range(5):
        asked = harness.submit_one("b", tokens=2)
        began = harness.clock.now()
        while harness.open[asked]:
            with contextlib.suppress(Overloaded):  # all waiting requests are submitted at once
                harness.submit_one("a", tokens=4)
            harness.step(0.5)
        waits.append(harness.clock.now() - began)
    assert max(waits) < 5.0 + 8.0 and not harness.rejected
    harness.finish()


def test_models_wake_in_the_order_in_which_they_began_to_wait() -> None:
    harness = GroupHarness(20, {"a": 10, "b": 20, "c": 5})
    harness.submit_one("a", tokens=30)
    harness.step()
    large = harness.submit_one("b")
    harness.step()
    small = harness.submit_one("c")  # it would fit beside a
    harness.finish()
    assert harness.log == ["sleep a", "wake b", "sleep b", "wake c"]
    assert harness.endings[large] == harness.endings[small] == 1


def test_model_keeps_its_position_while_its_requests_change() -> None:
    """Requests that wait for it are rejected in time, but the busy model keeps draining until it has finished."""
    harness = two_models(model_wait=8.0)
    harness.step(10.0)
    harness.submit_one("a", tokens=25)
    harness.step()
    names, waiting_id = [], ""
    while "wake b" not in harness.log:
        names.append(harness.submit_one("b"))
        if harness.clock.now() > 116.0:
            waiting_id = harness.submit_one("a", tokens=1)
        harness.step(1.0)
        assert waiting_id not in harness.tokens
    harness.finish()
    assert (
        isinstance(harness.rejected[names[0]], Overloaded)
        and harness.endings[names[-1]] == harness.endings[waiting_id] == 1
    )


def test_request_that_waited_too_long_is_rejected_with_retry_after() -> None:
    harness = two_models(model_wait=7.5)
    harness.submit_one("a", tokens=50)
    harness.step()
    name, slow = harness.submit_one("b"), harness.submit_one("b", timeout=3.0)
    harness.step(3.0)
    assert isinstance(harness.rejected[slow], DeadlineExceeded) and name not in harness.rejected
    harness.step(4.4)
    assert name not in harness.rejected
    harness.step(0.1)
    error = harness.rejected[name]
    assert isinstance(error, Overloaded) and error.retry_after == 5 and "busy" in error.message
    harness.finish()
    assert harness.log == []


def test_waiting_for_a_model_counts_as_queue_time() -> None:
    harness = two_models()
    harness.submit_one("a", tokens=10)
    harness.step()
    submitted_at = harness.clock.now()
    name, dying = harness.submit_one("b"), harness.submit_one("b", tokens=40, timeout=20.0)
    harness.step(4.0)
    while name not in harness.tokens:
        harness.step(0.5)
    harness.step(20.0)
    harness.finish()
    assert harness.timings[name] == submitted_at and harness.timings[dying] == submitted_at
    assert len(harness.tokens[dying]) < 40, "its time limit began when it came"


def test_failed_wake_rejects_only_the_requests_that_waited() -> None:
    harness = GroupHarness(20, {"a": 10, "b": 10, "c": 10})
    going = harness.submit_one("a", tokens=20)
    harness.step()
    harness.models["c"].fails = RuntimeError("out of memory")
    names = [harness.submit_one("c"), harness.submit_one("c", n=3)]
    harness.step()
    assert all(isinstance(harness.rejected[name], EngineUnavailable) for name in names)
    assert "out of memory" not in str(harness.rejected[names[0]]), "that is for the log"
    assert harness.reports[-1].sleep_changes == {"b"}
    again, other = harness.submit_one("c"), harness.submit_one("a")
    harness.finish()
    assert harness.endings[again] == harness.endings[other] == harness.endings[going] == 1


def test_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting would not help: the process ends, and its client starts another."""

    def raise_lost() -> None:
        raise RuntimeError("an illegal memory access")

    harness = two_models()
    harness.models["b"].fails = RuntimeError("an illegal memory access")
    harness.submit_one("b")
    monkeypatch.setattr(engine_group, "check_device", raise_lost)
    with pytest.raises(RuntimeError, match="illegal"):
        harness.step()


def test_model_that_cannot_sleep_continues() -> None:
    harness = two_models()
    harness.models["a"].fails = RuntimeError("cannot pin memory")
    name = harness.submit_one("b")
    harness.step()
    assert isinstance(harness.rejected[name], EngineUnavailable) and harness.awake == ["a"]
    harness.submit_one("a")
    harness.finish()
    harness.submit_one("b")
    harness.finish()
    assert harness.log == ["sleep a", "wake b"]


def test_waiting_submission_is_aborted() -> None:
    harness = two_models()
    harness.submit_one("a", tokens=30)
    harness.step()
    name = harness.submit_one("b", n=3)
    harness.step(10.0)
    assert harness.group.stats("b").waiting == harness.group.stats("b").asleep == 1
    waiting_id = harness.submit_one("a", tokens=1)
    harness.group.abort(name)
    harness.group.abort(name)
    harness.step()
    assert harness.endings[name] == 3 and harness.group.stats("b").waiting == 0
    harness.step()
    assert waiting_id in harness.tokens, "no model waits for a's memory any more"
    name = harness.submit_one("b")
    harness.step(10.0)
    harness.group.abort(name)
    harness.step()
    harness.submit_one("a", tokens=1)
    assert harness.group.stats("a").asleep == 0
    harness.finish()
    assert harness.log == []


def test_one_waiting_completion_is_aborted() -> None:
    harness = two_models()
    harness.submit_one("a", tokens=5)
    harness.step()
    name = harness.submit_one("b", n=3, tokens=4)
    harness.group.abort_completion(name, 1)
    harness.finish()
    assert harness.endings[name] == 3 and len(harness.tokens[name]) == 8
    harness.submit_one("a", tokens=5)
    harness.step()
    name = harness.submit_one("b", n=2)
    for index in (0, 0, 1):
        harness.group.abort_completion(name, index)
    harness.finish()
    assert harness.endings[name] == 2 and harness.log.count("wake b") == 1, "no request was left to wake it for"


def test_aborts_reach_their_engine_and_outputs_are_complete() -> None:
    harness = GroupHarness(10, {"a": 10, "b": 8}, is_pipelined=True)
    name = harness.submit_one("a", tokens=30)
    harness.step()
    harness.step()
    waiting = harness.submit_one("b", tokens=1)
    harness.group.abort(name)  # idle from here on, but its last output was not returned yet
    harness.step()
    assert harness.endings[name] == 1
    harness.finish()
    assert harness.endings[waiting] == 1 and harness.endings[name] == 1


def test_queue_of_a_sleeping_model_is_limited() -> None:
    harness = two_models(max_waiting=3)
    harness.submit_one("a", tokens=30)
    harness.step()
    for _ in range(3):
        harness.submit_one("b")
    with pytest.raises(Overloaded, match="wait for the sleeping model 'b'"):
        harness.submit_one("b")
    harness.finish()
    many = two_models()
    many.submit_one("a", tokens=5)
    many.step()
    names = [many.submit_one("b", tokens=1) for _ in range(20)]  # more than its engine accepts
    many.finish()
    assert sum(many.endings[name] for name in names) == 12
    assert sum(isinstance(many.rejected.get(name), Overloaded) for name in names) == 8


def test_only_changed_models_are_reported() -> None:
    harness = GroupHarness(20, {"a": 10, "b": 10}, is_pipelined=True)  # the first step has no tokens yet
    harness.step()
    harness.submit_one("a", tokens=2)
    harness.step()
    assert harness.reports[-1].outputs == {"a": []}
    harness.finish()
    harness.step()
    harness.step()
    harness.step()
    assert harness.reports[-1].outputs == {}


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_exactly_once(seed: int, is_pipelined: bool) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randrange(3, 11) for name in "abcde"}
    harness = GroupHarness(12, sizes, TimeSharingConfig(1.0, 3.0), is_pipelined, max_waiting=4)
    full, asked = 0, dict[str, int]()
    for _ in range(1500):
        if rng.random() < 0.4:
            try:
                n = rng.choice((1, 1, 2))
                asked[harness.submit_one(rng.choice("aaabcde"), rng.randrange(1, 25), n, rng.choice((2.0, 600.0)))] = n
            except Overloaded:
                full += 1
        if rng.random() < 0.05 and (left := [name for name, n in harness.open.items() if n]):
            name = rng.choice(left)
            _ = harness.group.abort(name) if rng.random() < 0.7 else harness.group.abort_completion(name, 0)
        if rng.random() < 0.02:
            harness.models[rng.choice("abcde")].fails = RuntimeError("no")
        harness.step(rng.choice((0.0, 0.05, 0.3)))
    for model in harness.models.values():
        model.fails = None
    harness.finish()
    kinds = Counter(type(error).__name__ for error in harness.rejected.values())
    done = [name for name in harness.open if name not in harness.rejected]
    assert kinds["EngineUnavailable"] and kinds["Overloaded"] and kinds["DeadlineExceeded"] and full, kinds
    assert all(harness.endings[name] == n for name, n in asked.items() if name in done)
    assert len(done) > 100 and {name[0] for name in done} == set("abcde")
    for model in harness.models.values():
        model.engine.kv.check_invariants()


def test_idle_models_sleep_when_told_and_a_request_wakes_its_model() -> None:
    harness = GroupHarness(30, {"a": 10, "b": 10})
    busy = harness.submit_one("b", tokens=20)
    harness.step()
    harness.group.set_asleep(True)
    assert harness.awake == ["b"] and harness.log == ["sleep a"]  # a model with open requests stays awake
    harness.step()
    assert harness.reports[-1].sleep_changes == {"a"}
    woken = harness.submit_one("a")
    harness.finish()
    assert harness.awake == ["a", "b"] and harness.endings == {busy: 1, woken: 1}
    harness.group.set_asleep(True)
    assert not harness.awake
    harness.models["a"].fails = RuntimeError("out of memory")
    harness.group.set_asleep(False)
    assert harness.awake == ["b"]  # a model that does not wake leaves the others usable


def test_woken_models_put_no_others_to_sleep() -> None:
    harness = GroupHarness(30, {"a": 10, "b": 25, "c": 10, "d": 10})
    harness.submit_one("c")
    harness.finish()
    assert harness.awake == ["a", "c"]
    harness.log.clear()
    harness.group.set_asleep(False)
    assert harness.awake == ["a", "c", "d"] and harness.log == ["wake d"]


def test_a_lost_rank_ends_the_engine_while_its_model_wakes() -> None:
    """Unlike an error of a device, after which other models continue."""
    harness = two_models()
    harness.models["b"].fails = EngineFailed("rank 1 of 2 was killed by signal 9")
    harness.submit_one("b")
    with pytest.raises(EngineFailed, match="rank 1 of 2"):
        harness.step()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_lost_rank_ends_the_engine_also_if_its_model_sleeps(name: str) -> None:
    class LostRanks:
        def check_ranks(self) -> None:
            raise EngineFailed("rank 1 of 2 was killed by signal 9")

    harness = two_models()
    harness.models[name].engine.group_runner = LostRanks()  # type: ignore[assignment]
    with pytest.raises(EngineFailed, match="rank 1 of 2"):
        harness.step()
