"""EngineGroup: when models are woken, how long requests wait, and that every request ends exactly once."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from emberline.core.clock import ManualClock
from emberline.core.config import SchedulerConfig, TimeSharingConfig
from emberline.core.errors import DeadlineExceeded, EmberlineError, EngineUnavailable, ModelNotFound, Overloaded
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Submission
from emberline.engine import engine_group
from emberline.engine.engine import Engine
from emberline.engine.engine_group import EngineGroup, StepReport
from emberline.engine.fake import FakePipelinedRunner, FakeRunner


@dataclass
class Fake:
    """A model whose engine asserts that it is not used while asleep. `fails` is raised by the next call."""

    name: str
    nbytes: int
    clock: ManualClock
    log: list[str]
    ahead: bool = False
    awake: bool = False
    fails: Exception | None = None

    def __post_init__(self) -> None:
        model = self

        class Runner(FakePipelinedRunner if self.ahead else FakeRunner):  # type: ignore[misc]
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
        self._turn("wake", True)
        return self.nbytes

    def sleep(self) -> int:
        assert self.awake and self.idle
        self._turn("sleep", False)
        return self.nbytes

    def _turn(self, what: str, awake: bool) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.awake = awake
        self.log.append(f"{what} {self.name}")


@dataclass
class House:
    memory: int
    sizes: dict[str, int]
    rules: TimeSharingConfig = field(default_factory=lambda: TimeSharingConfig(turn=5.0, wait=60.0))
    ahead: bool = False

    def __post_init__(self) -> None:
        self.clock, self.log = ManualClock(100.0), list[str]()
        self.models = {n: Fake(n, size, self.clock, self.log, self.ahead) for n, size in self.sizes.items()}
        self.fleet = EngineGroup(self.models, self.memory, self.rules, self.clock)
        del self.log[:]
        self.tokens: dict[str, list[int]] = {}
        self.endings: Counter[str] = Counter()
        self.timings: dict[str, float] = {}
        self.refused: dict[str, EmberlineError] = {}
        self.open: dict[str, int] = {}  # completions that have not ended
        self.reports: list[StepReport] = []

    def ask(self, model: str, tokens: int = 3, n: int = 1, timeout: float = 600.0) -> str:
        name = f"{model}{len(self.open)}"
        params = SamplingParams(max_tokens=tokens, n=n, temperature=0.0)
        self.fleet.add(Submission(name, [len(self.open) % 50 + 1, 2, 3], params, timeout=timeout, model=model))
        self.open[name] = n
        return name

    def step(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        report = self.fleet.step()
        self.reports.append(report)
        for model, outputs in report.outputs.items():
            for output in outputs:
                assert output.id.startswith(model)
                self.take(output)
        for name, error in report.rejected:
            assert self.open[name] > 0 and name not in self.tokens
            self.refused[name], self.open[name] = error, 0
        awake = [model for model in self.models.values() if model.awake]
        assert sum(model.nbytes for model in awake) <= self.memory
        assert {model.name for model in awake} == {name for name in self.models if self.fleet.is_awake(name)}

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
            if self.fleet.idle:
                break
            self.step()
        assert self.fleet.idle and not any(self.open.values())

    @property
    def awake(self) -> list[str]:
        return [name for name, model in self.models.items() if model.awake]


def two(**rules: float) -> House:
    return House(10, {"a": 10, "b": 8}, TimeSharingConfig(**({"turn": 5.0, "wait": 60.0} | rules)))  # type: ignore[arg-type]


def test_all_models_are_loaded_and_the_first_is_awake() -> None:
    clock, log = ManualClock(), list[str]()
    models = {name: Fake(name, 10, clock, log) for name in "abc"}
    fleet = EngineGroup(models, 10, TimeSharingConfig(), clock)
    assert log == ["wake c", "sleep c", "wake b", "sleep b", "wake a"]
    assert list(fleet.engines) == ["a", "b", "c"] and fleet.is_awake("a") and not fleet.is_awake("b")
    assert fleet.step().sleep_changes == {"a", "b", "c"} and fleet.step().sleep_changes == set()
    models = {name: Fake(name, 10, clock, log) for name in "abc"}
    models["b"].fails = RuntimeError("torn file")
    with pytest.raises(RuntimeError, match="torn file"):
        EngineGroup(models, 10, TimeSharingConfig(), clock)


def test_unknown_model_is_rejected() -> None:
    house = two()
    with pytest.raises(ModelNotFound, match=r"'z'.*a b"):
        house.ask("z")
    house.finish()


@pytest.mark.parametrize("ahead", [False, True])
def test_request_wakes_its_model_and_least_recently_used_ones_sleep(ahead: bool) -> None:
    house = House(20, {"a": 10, "b": 10, "c": 10}, ahead=ahead)
    house.step()
    assert house.awake == ["a", "b"]  # c was loaded first
    house.ask("a")
    house.ask("b")
    house.finish()
    house.step()  # the runner receives the ended ids
    house.step()
    name = house.ask("c")
    house.step()
    assert house.log == ["sleep a", "wake c"] and house.reports[-1].sleep_changes == {"a", "c"}
    assert set(house.reports[-1].outputs) >= {"a", "c"}
    house.finish()
    assert len(house.tokens[name]) == 3 and house.endings[name] == 1
    assert (house.fleet.sleep_stats("a").sleeps, house.fleet.sleep_stats("c").wakes) == (1, 2)


def test_tokens_equal_those_of_a_model_alone() -> None:
    house = two()
    names = [house.ask(model, tokens=4) for model in "abab"]
    house.finish()
    for name in names:
        alone = House(10, {name[0]: 10})
        alone.open = {str(i): 0 for i in range(names.index(name))}  # the same prompt
        assert alone.ask(name[0], tokens=4) == name
        alone.finish()
        assert alone.tokens[name] == house.tokens[name]


def test_busy_model_runs_for_its_turn_then_drains_and_sleeps() -> None:
    house = two()
    house.step(10.0)  # a has been awake for more than a turn
    first, other = house.ask("a", tokens=20), house.ask("b")
    house.step(4.9)
    late = house.ask("a", tokens=2)
    house.step()
    assert late in house.tokens, "it still takes requests"
    house.step(0.2)  # b has waited for one turn
    held = house.ask("a", tokens=2)
    while house.open[first]:
        assert house.awake == ["a"] and held not in house.tokens
        house.step()
    house.step()
    assert house.log == ["sleep a", "wake b"]
    house.finish()
    assert house.log == ["sleep a", "wake b", "sleep b", "wake a"]
    assert all(house.endings[name] == 1 for name in (first, late, other, held)) and not house.refused


def test_busy_model_is_not_drained_if_idle_ones_are_enough() -> None:
    house = House(20, {"a": 10, "b": 10, "c": 10})
    going = house.ask("a", tokens=30)
    house.ask("b", tokens=1)
    house.step()
    house.ask("c")
    house.step()
    assert house.log == ["sleep b", "wake c"] and house.open[going]  # though a was used less recently
    house.finish()


def test_model_that_just_woke_gets_its_turn() -> None:
    """This holds however long others have waited, or two busy models would only swap."""
    house = two()
    house.step(10.0)
    house.ask("a", tokens=20)
    house.ask("b", tokens=50)
    house.step(6.0)
    waiting = house.ask("a", tokens=2)
    while house.awake != ["b"]:
        house.step(0.5)
    house.step(4.0)  # a has waited for more than a turn
    quick = house.ask("b", tokens=2)
    house.step()
    assert quick in house.tokens and waiting not in house.tokens
    house.step(1.5)
    held = house.ask("b", tokens=2)
    house.step()
    assert held not in house.tokens
    house.finish()
    assert not house.refused


def test_model_that_is_no_longer_draining_continues_at_once() -> None:
    house = House(10, {"a": 10, "b": 10, "c": 10})
    house.ask("a", tokens=40)
    gone = house.ask("b")
    house.step(6.0)
    house.ask("c")  # a need not sleep for this one yet
    held = house.ask("a", tokens=1)
    house.step()
    assert held not in house.tokens
    house.fleet.abort(gone)
    house.step()
    house.step()
    assert held in house.tokens
    house.finish()


def test_constant_load_on_one_model_does_not_starve_another() -> None:
    house = two()
    waits = []
    for _ in range(5):
        asked = house.ask("b", tokens=2)
        began = house.clock.now()
        while house.open[asked]:
            with contextlib.suppress(Overloaded):  # all waiting requests are submitted at once
                house.ask("a", tokens=4)
            house.step(0.5)
        waits.append(house.clock.now() - began)
    assert max(waits) < 5.0 + 8.0 and not house.refused
    house.finish()


def test_models_wake_in_the_order_in_which_they_began_to_wait() -> None:
    house = House(20, {"a": 10, "b": 20, "c": 5})
    house.ask("a", tokens=30)
    house.step()
    large = house.ask("b")
    house.step()
    small = house.ask("c")  # it would fit beside a
    house.finish()
    assert house.log == ["sleep a", "wake b", "sleep b", "wake c"]
    assert house.endings[large] == house.endings[small] == 1


def test_model_keeps_its_position_while_its_requests_change() -> None:
    """Requests that wait for it are rejected in time, but the busy model keeps draining until it has finished."""
    house = two(wait=8.0)
    house.step(10.0)
    house.ask("a", tokens=25)
    house.step()
    names, held = [], ""
    while "wake b" not in house.log:
        names.append(house.ask("b"))
        if house.clock.now() > 116.0:
            held = house.ask("a", tokens=1)
        house.step(1.0)
        assert held not in house.tokens
    house.finish()
    assert isinstance(house.refused[names[0]], Overloaded) and house.endings[names[-1]] == house.endings[held] == 1


def test_request_that_waited_too_long_is_rejected_with_retry_after() -> None:
    house = two(wait=7.5)
    house.ask("a", tokens=50)
    house.step()
    name, slow = house.ask("b"), house.ask("b", timeout=3.0)
    house.step(3.0)
    assert isinstance(house.refused[slow], DeadlineExceeded) and name not in house.refused
    house.step(4.4)
    assert name not in house.refused
    house.step(0.1)
    error = house.refused[name]
    assert isinstance(error, Overloaded) and error.retry_after == 5 and "busy" in error.message
    house.finish()
    assert house.log == []


def test_waiting_for_a_model_counts_as_queue_time() -> None:
    house = two()
    house.ask("a", tokens=10)
    house.step()
    came = house.clock.now()
    name, dying = house.ask("b"), house.ask("b", tokens=40, timeout=20.0)
    house.step(4.0)
    while name not in house.tokens:
        house.step(0.5)
    house.step(20.0)
    house.finish()
    assert house.timings[name] == came and house.timings[dying] == came
    assert len(house.tokens[dying]) < 40, "its time limit began when it came"


def test_failed_wake_rejects_only_the_requests_that_waited() -> None:
    house = House(20, {"a": 10, "b": 10, "c": 10})
    going = house.ask("a", tokens=20)
    house.step()
    house.models["c"].fails = RuntimeError("out of memory")
    names = [house.ask("c"), house.ask("c", n=3)]
    house.step()
    assert all(isinstance(house.refused[name], EngineUnavailable) for name in names)
    assert "out of memory" not in str(house.refused[names[0]]), "that is for the log"
    assert house.reports[-1].sleep_changes == {"b"}
    again, other = house.ask("c"), house.ask("a")
    house.finish()
    assert house.endings[again] == house.endings[other] == house.endings[going] == 1


def test_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting would not help: the process ends, and its client starts another."""

    def lost() -> None:
        raise RuntimeError("an illegal memory access")

    house = two()
    house.models["b"].fails = RuntimeError("an illegal memory access")
    house.ask("b")
    monkeypatch.setattr(engine_group, "check_device", lost)
    with pytest.raises(RuntimeError, match="illegal"):
        house.step()


def test_model_that_cannot_sleep_continues() -> None:
    house = two()
    house.models["a"].fails = RuntimeError("cannot pin memory")
    name = house.ask("b")
    house.step()
    assert isinstance(house.refused[name], EngineUnavailable) and house.awake == ["a"]
    house.ask("a")
    house.finish()
    house.ask("b")
    house.finish()
    assert house.log == ["sleep a", "wake b"]


def test_waiting_submission_is_aborted() -> None:
    house = two()
    house.ask("a", tokens=30)
    house.step()
    name = house.ask("b", n=3)
    house.step(10.0)
    assert house.fleet.stats("b").waiting == house.fleet.stats("b").asleep == 1
    held = house.ask("a", tokens=1)
    house.fleet.abort(name)
    house.fleet.abort(name)
    house.step()
    assert house.endings[name] == 3 and house.fleet.stats("b").waiting == 0
    house.step()
    assert held in house.tokens, "nobody waits for a's memory any more"
    name = house.ask("b")
    house.step(10.0)
    house.fleet.abort(name)
    house.step()
    house.ask("a", tokens=1)
    assert house.fleet.stats("a").asleep == 0
    house.finish()
    assert house.log == []


def test_one_waiting_completion_is_aborted() -> None:
    house = two()
    house.ask("a", tokens=5)
    house.step()
    name = house.ask("b", n=3, tokens=4)
    house.fleet.abort_completion(name, 1)
    house.finish()
    assert house.endings[name] == 3 and len(house.tokens[name]) == 8
    house.ask("a", tokens=5)
    house.step()
    name = house.ask("b", n=2)
    for index in (0, 0, 1):
        house.fleet.abort_completion(name, index)
    house.finish()
    assert house.endings[name] == 2 and house.log.count("wake b") == 1, "nobody was left to wake it for"


def test_aborts_reach_their_engine_and_outputs_are_complete() -> None:
    house = House(10, {"a": 10, "b": 8}, ahead=True)
    name = house.ask("a", tokens=30)
    house.step()
    house.step()
    waiting = house.ask("b", tokens=1)
    house.fleet.abort(name)  # idle from here on, but its last output was not returned yet
    house.step()
    assert house.endings[name] == 1
    house.finish()
    assert house.endings[waiting] == 1 and house.endings[name] == 1


def test_queue_of_a_sleeping_model_is_limited() -> None:
    house = two(max_waiting=3)
    house.ask("a", tokens=30)
    house.step()
    for _ in range(3):
        house.ask("b")
    with pytest.raises(Overloaded, match="wait for the sleeping model 'b'"):
        house.ask("b")
    house.finish()
    many = two()
    many.ask("a", tokens=5)
    many.step()
    names = [many.ask("b", tokens=1) for _ in range(20)]  # more than its engine accepts
    many.finish()
    assert sum(many.endings[name] for name in names) == 12
    assert sum(isinstance(many.refused.get(name), Overloaded) for name in names) == 8


def test_only_changed_models_are_reported() -> None:
    house = House(20, {"a": 10, "b": 10}, ahead=True)  # the first step has no tokens yet
    house.step()
    house.ask("a", tokens=2)
    house.step()
    assert house.reports[-1].outputs == {"a": []}
    house.finish()
    house.step()
    house.step()
    house.step()
    assert house.reports[-1].outputs == {}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_exactly_once(seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randrange(3, 11) for name in "abcde"}
    house = House(12, sizes, TimeSharingConfig(turn=1.0, wait=3.0, max_waiting=4), ahead=ahead)
    full, asked = 0, dict[str, int]()
    for _ in range(1500):
        if rng.random() < 0.4:
            try:
                n = rng.choice((1, 1, 2))
                asked[house.ask(rng.choice("aaabcde"), rng.randrange(1, 25), n, rng.choice((2.0, 600.0)))] = n
            except Overloaded:
                full += 1
        if rng.random() < 0.05 and (left := [name for name, n in house.open.items() if n]):
            name = rng.choice(left)
            _ = house.fleet.abort(name) if rng.random() < 0.7 else house.fleet.abort_completion(name, 0)
        if rng.random() < 0.02:
            house.models[rng.choice("abcde")].fails = RuntimeError("no")
        house.step(rng.choice((0.0, 0.05, 0.3)))
    for model in house.models.values():
        model.fails = None
    house.finish()
    kinds = Counter(type(error).__name__ for error in house.refused.values())
    done = [name for name in house.open if name not in house.refused]
    assert kinds["EngineUnavailable"] and kinds["Overloaded"] and kinds["DeadlineExceeded"] and full, kinds
    assert all(house.endings[name] == n for name, n in asked.items() if name in done)
    assert len(done) > 100 and {name[0] for name in done} == set("abcde")
    for model in house.models.values():
        model.engine.kv.check_invariants()
