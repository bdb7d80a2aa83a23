"""Several models on one device: which one sleeps, with fakes; and real engines that sleep, with the CPU as device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from on_host import booted, plain_arithmetic, planned

from emberline.core.clock import ManualClock
from emberline.core.errors import ModelError, ModelNotFound, Overloaded
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu import boot
from emberline.engine.gpu.swap import SleepManager, SwappedEngine, model_memory
from emberline.engine.memory import RESERVE_BYTES, USABLE_FRACTION, plan_memory
from emberline.kernels import ops, ref
from emberline.models.sleep import iter_instances, sleep


@dataclass
class Fake:
    """A model that has only a size. `fails` is raised by the next call."""

    name: str
    nbytes: int
    clock: ManualClock
    log: list[str]
    idle: bool = True
    awake: bool = False
    fails: Exception | None = None

    def wake(self) -> int:
        assert not self.awake
        return self._turn("wake", 3.0, True)

    def sleep(self) -> int:
        assert self.awake and self.idle
        return self._turn("sleep", 2.0, False)

    def _turn(self, what: str, seconds: float, awake: bool) -> int:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.clock.advance(seconds)
        self.awake = awake
        self.log.append(f"{what} {self.name}")
        return self.nbytes // 2


@dataclass
class House:
    memory: int
    sizes: dict[str, int]
    clock: ManualClock = field(default_factory=ManualClock)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sleeper = SleepManager(self.memory, self.clock)
        self.models = {name: Fake(name, size, self.clock, self.log) for name, size in self.sizes.items()}
        for name, model in self.models.items():
            self.sleeper.add(name, model)

    def use(self, *names: str) -> list[str]:
        del self.log[:]
        for name in names:
            self.sleeper.ensure_awake(name)
        self.check()
        return self.log

    def check(self) -> None:
        awake = {name for name, model in self.models.items() if model.awake}
        assert set(self.sleeper.awake_models) == awake
        assert self.sleeper.used_bytes == sum(self.models[name].nbytes for name in awake) <= self.memory


def test_least_recently_used_models_sleep_and_no_others() -> None:
    house = House(100, {"a": 40, "b": 30, "c": 30, "d": 50})
    assert house.use("a", "b", "c") == ["wake a", "wake b", "wake c"]  # exactly full
    assert house.use("a", "a") == []
    assert house.sleeper.awake_models == ("b", "c", "a")
    assert house.use("d") == ["sleep b", "sleep c", "wake d"]
    assert house.use("b") == ["sleep a", "wake b"]
    assert house.sleeper.awake_models == ("d", "b") and house.sleeper.used_bytes == 80


def test_seconds_and_bytes_are_counted() -> None:
    house = House(10, {"a": 10, "b": 8})
    house.use("a", "b", "a")
    turns = house.sleeper.stats["a"]
    assert (turns.wakes, turns.wake_seconds, turns.wake_bytes) == (2, 6.0, 10)
    assert (turns.sleeps, turns.sleep_seconds, turns.sleep_bytes) == (1, 2.0, 5)
    assert house.sleeper.stats["b"].sleep_bytes == 4


def test_busy_models_do_not_sleep() -> None:
    house = House(100, {"a": 40, "b": 30, "c": 30, "d": 50})
    house.use("a", "b", "c")
    house.models["a"].idle = False
    assert house.use("d") == ["sleep b", "sleep c", "wake d"]  # a was used less recently
    house.models["d"].idle = False
    with pytest.raises(Overloaded, match=r"'b' needs .* a d"):
        house.use("b")
    house.check()
    assert house.log == [] and house.sleeper.awake_models == ("a", "d")
    assert house.use("a") == []


def test_busy_models_to_sleep_are_listed() -> None:
    house = House(100, {"a": 40, "b": 30, "c": 30, "d": 50, "e": 100})
    house.use("a", "b", "c")
    assert house.sleeper.busy_models_to_sleep("d") == []
    house.models["a"].idle = False
    assert house.sleeper.busy_models_to_sleep("d") == [] and house.sleeper.busy_models_to_sleep("e") == ["a"]
    house.models["c"].idle = False
    assert house.sleeper.busy_models_to_sleep("d") == ["a"]  # enough together with b; used less recently than c
    house.models["b"].idle = False
    assert house.sleeper.busy_models_to_sleep("d") == ["a", "b"] and house.sleeper.busy_models_to_sleep("e") == [
        "a",
        "b",
        "c",
    ]
    assert house.sleeper.busy_models_to_sleep("c") == []  # the model is already awake
    assert house.sleeper.awake_since("a") == 3.0 and house.sleeper.awake_since("d") is None


def test_impossible_wake_changes_nothing() -> None:
    house = House(100, {"a": 40, "b": 30, "c": 90})
    house.use("a", "b")
    house.models["b"].idle = False
    with pytest.raises(Overloaded):
        house.use("c")
    assert house.sleeper.awake_models == ("a", "b") and house.models["a"].awake
    with pytest.raises(ModelNotFound, match="'z'"):
        house.use("z")
    with pytest.raises(ModelError, match="'huge' needs"):
        house.sleeper.add("huge", Fake("huge", 101, house.clock, house.log))


def test_failed_wake_or_sleep_leaves_other_models_unchanged() -> None:
    house = House(100, {"a": 40, "b": 60, "c": 60})
    house.use("a", "b")
    house.models["c"].fails = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        house.use("c")
    house.check()
    assert not house.models["c"].awake and house.models["b"].awake == ("b" in house.sleeper.awake_models)
    assert house.sleeper.stats["c"].wakes == 0
    assert house.use("c") == ["wake c"]  # enough memory is already free
    house.models["c"].fails = ModelError("cannot pin")
    with pytest.raises(ModelError, match="cannot pin"):
        house.use("b")
    house.check()
    assert house.models["c"].awake and not house.models["b"].awake
    assert house.use("b") == ["sleep c", "wake b"]


def test_awake_models_always_fit_the_memory() -> None:
    rng = random.Random(3)
    house = House(100, {f"m{i}": rng.randrange(1, 101) for i in range(8)})
    used: list[str] = []
    for _ in range(2000):
        model = house.models[rng.choice(list(house.models))]
        model.idle = rng.random() < 0.8
        name = rng.choice(list(house.models))
        held = {n for n, m in house.models.items() if m.awake and not m.idle}
        if rng.random() < 0.1:
            model.fails = RuntimeError("no")
        try:
            house.use(name)
            used.append(name)
            assert house.sleeper.awake_models[-1] == name
        except (Overloaded, RuntimeError):
            pass
        house.check()
        assert all(house.models[n].awake for n in held)
    assert len(used) > 500


def test_model_memory_matches_the_plans() -> None:
    config = boot.ModelConfig.from_hf(tiny.CONFIGS["llama"])
    total = 80 << 30
    whole = plan_memory(
        config, total, dtype_bytes=2, kv_dtype_bytes=2, block_size=64, max_running=8, max_batch_tokens=64,
        max_context=64,
    )  # fmt: skip
    model = SwappedEngine(whole, lambda: pytest.fail("not yet"))
    block = whole.kv_bytes // whole.kv_blocks
    assert (
        model_memory(total) - block
        < model.nbytes
        <= model_memory(total)
        == int(total * USABLE_FRACTION) - RESERVE_BYTES
    )
    assert model.idle


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_backend", ops._backend)
    monkeypatch.setattr(ref, "uniform_from_seed", ref.uniform_from_seed)
    plain_arithmetic()


def tokens(engine: Engine, name: str) -> dict[str, list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 131) for _ in range(20)]
    for i in range(5):
        prompt = shared + [rng.randrange(3, 131) for _ in range(rng.randrange(1, 20))]
        engine.add(Submission(f"{name}{i}", prompt, SamplingParams(max_tokens=12, seed=i, ignore_eos=True)))
    found: dict[str, list[int]] = {}
    while not engine.idle:
        for o in engine.step():
            assert o.error is None
            found.setdefault(o.id.removeprefix(name), []).extend(o.tokens)
    engine.kv.check_invariants()
    return found


@pytest.mark.usefixtures("plain")
def test_engine_gives_the_same_tokens_after_sleep(tmp_path: Path) -> None:
    kinds = {"a": "llama", "b": "qwen3"}
    homes = {name: tiny.write(tmp_path / name, kind, seed=i) for i, (name, kind) in enumerate(kinds.items())}
    models = {name: SwappedEngine(planned(home), lambda home=home: booted(home)) for name, home in homes.items()}
    sleeper = SleepManager(max(m.nbytes for m in models.values()))
    for name, model in models.items():
        sleeper.add(name, model)
    expected = {name: tokens(booted(home).engine, "x") for name, home in homes.items()}
    hits = dict.fromkeys(models, 0)
    for turn in range(3):
        for name, model in models.items():
            sleeper.ensure_awake(name)
            assert sleeper.awake_models == (name,)
            assert (
                model.engine.kv.num_cached == 0 and model.engine.kv.hit_tokens == hits[name]
            )  # the blocks are lost, the counters are kept
            assert tokens(model.engine, f"{turn}-") == expected[name]
            assert tokens(model.engine, f"{turn}+") == expected[name]
            assert model.engine.kv.hit_tokens > hits[name]
            hits[name] = model.engine.kv.hit_tokens
    turns = sleeper.stats["a"]
    storages = [t.untyped_storage() for t in memory_of(models["b"])]
    copied = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert sleeper.stats["b"].sleep_bytes == copied > 0  # copied once, though it slept twice
    assert (turns.wakes, turns.sleeps, sleeper.stats["b"].sleeps) == (3, 3, 2)


def memory_of(model: SwappedEngine) -> list[torch.Tensor]:
    assert model._gpu_engine is not None
    return list(iter_instances(torch.Tensor, model._gpu_engine.runner.model))


@pytest.mark.usefixtures("plain")
def test_sleeping_engine_has_no_memory_and_cannot_run(tmp_path: Path) -> None:
    home = tiny.write(tmp_path / "m", "qwen2")
    model = SwappedEngine(planned(home), lambda: booted(home))
    model.wake()
    expected = tokens(model.engine, "a")
    model.engine.add(Submission("open", [3, 4], SamplingParams(max_tokens=2)))
    assert not model.idle
    model.engine.abort("open")
    assert [o.id for o in model.engine.step()] == ["open"] and model.idle
    held = [*memory_of(model), model.engine.runner.cache.keys, model.engine.runner.cache.values]  # type: ignore[attr-defined]
    model.sleep()
    assert all(t.untyped_storage().nbytes() == 0 for t in held)
    with pytest.raises(AssertionError, match="the model sleeps"):
        _ = model.engine
    fail_during_wake(model)
    assert all(t.untyped_storage().nbytes() == 0 for t in held)  # restored memory was freed again
    model.wake()
    assert not model.engine.runner.cache.keys.any()  # type: ignore[attr-defined]
    assert tokens(model.engine, "b") == expected
    model.sleep()
    model.close()


def fail_during_wake(model: SwappedEngine) -> None:
    assert model._sleep is not None
    one = model._sleep._slept[3]
    storage = one.storage

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def resize_(self, size: int) -> None:
            raise RuntimeError("out of memory")

    one.storage = Full()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        model.wake()
    one.storage = storage


def test_failed_boot_can_be_retried(tmp_path: Path) -> None:
    home = tiny.write(tmp_path / "m")
    errors = [RuntimeError("out of memory")]

    def make() -> boot.BootedGPUEngine:
        if errors:
            raise errors.pop()
        return booted(home)

    model = SwappedEngine(planned(home), make)
    with pytest.raises(RuntimeError):
        model.wake()
    assert model.idle
    assert model.wake() == model.engine.runner.model.weight_bytes  # type: ignore[attr-defined]


def test_sleep_keeps_weights_and_zeroes_scratch() -> None:
    weights, scratch = torch.randn(100), torch.randn(50)
    part, before = weights[10:20], weights.clone()
    slept = sleep([weights, part], zeroed=[scratch, part])
    assert slept.nbytes == weights.nbytes + scratch.nbytes and slept.copied_bytes == weights.nbytes
    for _ in range(3):
        assert weights.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
        slept.wake(keep=True)
        assert torch.equal(weights, before) and torch.equal(part, before[10:20]) and not scratch.any()
        assert slept.wake(keep=True)  # already awake: nothing is copied
        scratch.fill_(7.0)
        slept.sleep_again()
    slept.wake()
    assert slept.nbytes == 0 and torch.equal(weights, before)
