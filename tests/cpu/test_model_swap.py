"""Several models on one device: which one sleeps, with fakes; and real engines that sleep, with the CPU as device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_delta
import torch
from engine_runs import run_engine
from fake_sleep import FakeSleeper
from host_engine import booted, plain_arithmetic, planned

from emberline.core.clock import ManualClock
from emberline.core.errors import ModelError, ModelNotFound, Overloaded
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu import boot
from emberline.engine.gpu.swap import SleepManager, SwappedEngine, equal_kv_share, usable_model_bytes
from emberline.engine.memory import DEFAULT_UTILIZATION, RESERVE_BYTES, plan_memory
from emberline.kernels import backend, reference
from emberline.models.sleep import iter_instances, put_to_sleep


@dataclass
class FakeModel(FakeSleeper):
    """A model that has only a size."""

    idle: bool = True

    def wake(self) -> int:
        assert not self.awake
        self.change_state("wake", True, seconds=3.0)
        return self.nbytes // 2

    def sleep(self) -> int:
        assert self.awake and self.idle
        self.change_state("sleep", False, seconds=2.0)
        return self.nbytes // 2


@dataclass
class SwapHarness:
    memory: int
    sizes: dict[str, int]
    clock: ManualClock = field(default_factory=ManualClock)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = SleepManager(self.memory, self.clock)
        self.models = {name: FakeModel(name, size, self.clock, self.log) for name, size in self.sizes.items()}
        for name, model in self.models.items():
            self.manager.add(name, model)

    def use(self, *names: str) -> list[str]:
        del self.log[:]
        for name in names:
            self.manager.ensure_awake(name)
        self.check()
        return self.log

    def check(self) -> None:
        awake = {name for name, model in self.models.items() if model.awake}
        assert set(self.manager.awake_models) == awake
        assert self.manager.used_bytes == sum(self.models[name].nbytes for name in awake) <= self.memory


def test_least_recently_used_models_sleep_and_no_others() -> None:
    harness = SwapHarness(100, {"a": 40, "b": 30, "c": 30, "d": 50})
    assert harness.use("a", "b", "c") == ["wake a", "wake b", "wake c"]  # exactly full
    assert harness.use("a", "a") == []
    assert harness.manager.awake_models == ("b", "c", "a")
    assert harness.use("d") == ["sleep b", "sleep c", "wake d"]
    assert harness.use("b") == ["sleep a", "wake b"]
    assert harness.manager.awake_models == ("d", "b") and harness.manager.used_bytes == 80


def test_seconds_and_bytes_are_counted() -> None:
    harness = SwapHarness(10, {"a": 10, "b": 8})
    harness.use("a", "b", "a")
    sleep_stats = harness.manager.stats["a"]
    assert (sleep_stats.wakes, sleep_stats.wake_seconds, sleep_stats.wake_bytes) == (2, 6.0, 10)
    assert (sleep_stats.sleeps, sleep_stats.sleep_seconds, sleep_stats.sleep_bytes) == (1, 2.0, 5)
    assert harness.manager.stats["b"].sleep_bytes == 4


def test_busy_models_do_not_sleep() -> None:
    harness = SwapHarness(100, {"a": 40, "b": 30, "c": 30, "d": 50})
    harness.use("a", "b", "c")
    harness.models["a"].idle = False
    assert harness.use("d") == ["sleep b", "sleep c", "wake d"]  # a was used less recently
    harness.models["d"].idle = False
    with pytest.raises(Overloaded, match=r"'b' needs .* a d"):
        harness.use("b")
    harness.check()
    assert harness.log == [] and harness.manager.awake_models == ("a", "d")
    assert harness.use("a") == []


def test_busy_models_to_sleep_are_listed() -> None:
    harness = SwapHarness(100, {"a": 40, "b": 30, "c": 30, "d": 50, "e": 100})
    harness.use("a", "b", "c")
    assert harness.manager.busy_models_to_sleep("d") == []
    harness.models["a"].idle = False
    assert harness.manager.busy_models_to_sleep("d") == [] and harness.manager.busy_models_to_sleep("e") == ["a"]
    harness.models["c"].idle = False
    assert harness.manager.busy_models_to_sleep("d") == ["a"]  # enough together with b; used less recently than c
    harness.models["b"].idle = False
    assert harness.manager.busy_models_to_sleep("d") == ["a", "b"] and harness.manager.busy_models_to_sleep("e") == [
        "a",
        "b",
        "c",
    ]
    assert harness.manager.busy_models_to_sleep("c") == []  # the model is already awake
    assert harness.manager.awake_since("a") == 3.0 and harness.manager.awake_since("d") is None


def test_impossible_wake_changes_nothing() -> None:
    harness = SwapHarness(100, {"a": 40, "b": 30, "c": 90})
    harness.use("a", "b")
    harness.models["b"].idle = False
    with pytest.raises(Overloaded):
        harness.use("c")
    assert harness.manager.awake_models == ("a", "b") and harness.models["a"].awake
    with pytest.raises(ModelNotFound, match="'z'"):
        harness.use("z")
    with pytest.raises(ModelError, match="'huge' needs"):
        harness.manager.add("huge", FakeModel("huge", 101, harness.clock, harness.log))


def test_failed_wake_or_sleep_leaves_other_models_unchanged() -> None:
    harness = SwapHarness(100, {"a": 40, "b": 60, "c": 60})
    harness.use("a", "b")
    harness.models["c"].fails = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        harness.use("c")
    harness.check()
    assert not harness.models["c"].awake and harness.models["b"].awake == ("b" in harness.manager.awake_models)
    assert harness.manager.stats["c"].wakes == 0
    assert harness.use("c") == ["wake c"]  # enough memory is already free
    harness.models["c"].fails = ModelError("cannot pin")
    with pytest.raises(ModelError, match="cannot pin"):
        harness.use("b")
    harness.check()
    assert harness.models["c"].awake and not harness.models["b"].awake
    assert harness.use("b") == ["sleep c", "wake b"]


def test_awake_models_always_fit_the_memory() -> None:
    rng = random.Random(3)
    harness = SwapHarness(100, {f"m{i}": rng.randrange(1, 101) for i in range(8)})
    used: list[str] = []
    for _ in range(2000):
        model = harness.models[rng.choice(list(harness.models))]
        model.idle = rng.random() < 0.8
        name = rng.choice(list(harness.models))
        busy = {n for n, m in harness.models.items() if m.awake and not m.idle}
        if rng.random() < 0.1:
            model.fails = RuntimeError("no")
        try:
            harness.use(name)
            used.append(name)
            assert harness.manager.awake_models[-1] == name
        except (Overloaded, RuntimeError):
            pass
        harness.check()
        assert all(harness.models[n].awake for n in busy)
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
        usable_model_bytes(total) - block
        < model.nbytes
        <= usable_model_bytes(total)
        == int(total * DEFAULT_UTILIZATION) - RESERVE_BYTES
    )
    assert model.idle


@pytest.fixture
def use_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend", backend._backend)
    monkeypatch.setattr(reference, "uniform_from_seed", reference.uniform_from_seed)
    plain_arithmetic()


def tokens(engine: Engine, name: str) -> dict[str, list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 131) for _ in range(20)]
    pending = []
    for i in range(5):
        prompt = shared + [rng.randrange(3, 131) for _ in range(rng.randrange(1, 20))]
        pending.append(Submission(f"{name}{i}", prompt, SamplingParams(max_tokens=12, seed=i, ignore_eos=True)))
    return {id.removeprefix(name): made for id, made in run_engine(engine, pending).items()}


@pytest.mark.usefixtures("use_plain_arithmetic")
def test_engine_gives_the_same_tokens_after_sleep(tmp_path: Path) -> None:
    kinds = {"a": "llama", "b": "qwen3"}
    homes = {name: tiny.write(tmp_path / name, kind, seed=i) for i, (name, kind) in enumerate(kinds.items())}
    models = {name: SwappedEngine(planned(home), lambda home=home: booted(home)) for name, home in homes.items()}
    manager = SleepManager(max(m.nbytes for m in models.values()))
    for name, model in models.items():
        manager.add(name, model)
    expected = {name: tokens(booted(home).engine, "x") for name, home in homes.items()}
    hits = dict.fromkeys(models, 0)
    for turn in range(3):
        for name, model in models.items():
            manager.ensure_awake(name)
            assert manager.awake_models == (name,)
            assert (
                model.engine.kv.num_cached_blocks == 0 and model.engine.kv.hit_tokens == hits[name]
            )  # the blocks are lost, the counters are kept
            assert tokens(model.engine, f"{turn}-") == expected[name]
            assert tokens(model.engine, f"{turn}+") == expected[name]
            assert model.engine.kv.hit_tokens > hits[name]
            hits[name] = model.engine.kv.hit_tokens
    sleep_stats = manager.stats["a"]
    storages = [t.untyped_storage() for t in memory_of(models["b"])]
    copied = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert manager.stats["b"].sleep_bytes == copied > 0  # copied once, though it slept twice
    assert (sleep_stats.wakes, sleep_stats.sleeps, manager.stats["b"].sleeps) == (3, 3, 2)


def memory_of(model: SwappedEngine) -> list[torch.Tensor]:
    assert model._gpu_engine is not None
    return list(iter_instances(torch.Tensor, model._gpu_engine.runner.model))


@pytest.mark.usefixtures("use_plain_arithmetic")
def test_sleeping_engine_has_no_memory_and_cannot_run(tmp_path: Path) -> None:
    home = tiny.write(tmp_path / "m", "qwen2")
    model = SwappedEngine(planned(home), lambda: booted(home))
    model.wake()
    expected = tokens(model.engine, "a")
    model.engine.add(Submission("open", [3, 4], SamplingParams(max_tokens=2)))
    assert not model.idle
    model.engine.abort("open")
    assert [o.id for o in model.engine.step()] == ["open"] and model.idle
    busy = [*memory_of(model), model.engine.runner.cache.keys, model.engine.runner.cache.values]  # type: ignore[attr-defined]
    model.sleep()
    assert all(t.untyped_storage().nbytes() == 0 for t in busy)
    with pytest.raises(AssertionError, match="the model sleeps"):
        _ = model.engine
    fail_during_wake(model)
    assert all(t.untyped_storage().nbytes() == 0 for t in busy)  # restored memory was freed again
    model.wake()
    assert not model.engine.runner.cache.keys.any()  # type: ignore[attr-defined]
    assert tokens(model.engine, "b") == expected
    model.sleep()
    model.close()


def fail_during_wake(model: SwappedEngine) -> None:
    assert model._memory is not None and model._memory._sleeping_memory is not None
    one = model._memory._sleeping_memory._slept[3]
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
    slept = put_to_sleep([weights, part], zeroed_tensors=[scratch, part])
    assert slept.nbytes == weights.nbytes + scratch.nbytes and slept.copied_bytes == weights.nbytes
    for _ in range(3):
        assert weights.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
        slept.wake(keep_host_copies=True)
        assert torch.equal(weights, before) and torch.equal(part, before[10:20]) and not scratch.any()
        assert slept.wake(keep_host_copies=True)  # already awake: nothing is copied
        scratch.fill_(7.0)
        slept.sleep_again()
    slept.wake()
    assert slept.nbytes == 0 and torch.equal(weights, before)


def test_states_are_not_subtracted_from_the_share_that_holds_them() -> None:
    config = boot.ModelConfig.from_hf(tiny_delta.make_config("next"))
    plan = plan_memory(
        config, 80 << 30, dtype_bytes=2, kv_dtype_bytes=2, block_size=64, max_running=8, max_batch_tokens=64,
        max_context=64, state_slots=2_500_000,
    )  # fmt: skip
    assert plan.states > 20 << 30  # as it would have alone
    share = equal_kv_share([[plan], [plan]], usable_model_bytes(80 << 30))
    assert share is not None and 2 * share > 70 << 30
