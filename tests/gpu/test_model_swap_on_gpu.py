"""Models that share a GPU over time: the same tokens after sleep, graphs captured again, memory freed."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import tiny
import torch
from engine_runs import run_engine
from gpu_settings import gpu_config

from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = {"max_running": 16, "max_batch_tokens": 512, "max_context": 2048, "kv_tokens": 256 * 1024}
KINDS = {"a": tiny.config("llama", **tiny.LARGE_VOCAB_SIZES), "b": tiny.config("qwen3", **tiny.LARGE_VOCAB_SIZES)}
SEGMENT = 10 << 20  # larger allocations have their own memory, which torch returns when they are freed
LEFT = 512 << 20  # cuBLAS's workspace of a stream, handles, and small tensors that share memory with others


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny.write(tmp_path_factory.mktemp(name), config, seed=i)
        for i, (name, config) in enumerate(KINDS.items())
    }


def make_swapped(home: Path, dtype: torch.dtype, **settings: object):  # type: ignore[no-untyped-def]
    from emberline.engine.gpu.boot import boot_from_checkpoint
    from emberline.engine.gpu.swap import SwappedEngine
    from emberline.engine.memory import plan_memory
    from emberline.hub.checkpoint import Checkpoint
    from emberline.models.config import ModelConfig

    chosen = gpu_config(**(SETTINGS | settings))
    planned = plan_memory(
        ModelConfig.from_hf(Checkpoint.open(home).config),
        torch.cuda.mem_get_info()[1],
        dtype_bytes=dtype.itemsize,
        kv_dtype_bytes=dtype.itemsize,
        block_size=chosen.scheduler.block_size,
        max_running=chosen.scheduler.max_running,
        max_batch_tokens=chosen.scheduler.max_batch_tokens,
        max_context=2048,
        kv_tokens=chosen.kv_cache.kv_tokens,
        packed=chosen.gpu.weights == "packed",
    )
    return SwappedEngine(planned, lambda: boot_from_checkpoint(home, chosen, dtype=dtype))


def tokens(engine: Engine, name: str) -> dict[str, list[int]]:
    """Prompts share a block, so that cached blocks would be used; they need chunks, then graphs of several sizes."""
    rng = random.Random(7)
    shared = [rng.randrange(3, 32000) for _ in range(130)]
    pending = []
    for i, length in enumerate((5, 131, 400, 900, 200)):
        prompt = (shared + [rng.randrange(3, 32000) for _ in range(length)])[:length]
        # Greedy: among 32,000 nearly equal tokens, sampling would depend on the last bits of the logits.
        params = SamplingParams(max_tokens=20 + 5 * i, temperature=0.0, ignore_eos=True)
        pending.append(Submission(f"{name}{i}", prompt, params))
    return {id.removeprefix(name): made for id, made in run_engine(engine, pending).items()}


def poison(size: int) -> None:
    """Fill the sleeping model's former memory with NaN, so that a read from an old address shows."""
    blocks = [torch.full((64 << 20,), float("nan"), device="cuda") for _ in range(-(-size // (256 << 20)))]
    small = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del blocks, small
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_models_by_turns_give_the_same_tokens(checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
    from emberline.engine.gpu.swap import SleepManager

    models = {name: make_swapped(home, dtype) for name, home in checkpoints.items()}
    sleeper = SleepManager(max(model.nbytes for model in models.values()))
    for name, model in models.items():
        sleeper.add(name, model)
    expected: dict[str, dict[str, list[int]]] = {}
    for turn in range(3):
        for name, model in models.items():
            sleeper.ensure_awake(name)
            assert sleeper.awake_models == (name,) and model.engine.kv.num_cached_blocks == 0
            tokens_now = tokens(model.engine, f"{turn}-")
            assert tokens_now == expected.setdefault(name, tokens_now), (name, turn)
    assert expected["a"] != expected["b"]
    turns = sleeper.stats["b"]
    assert (turns.wakes, turns.sleeps) == (3, 2) and turns.sleep_bytes >= models["b"].engine.runner.model.weight_bytes
    for model in models.values():
        model.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sleep_frees_device_memory(checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
    from emberline.models.sleep import iter_instances

    first = make_swapped(checkpoints["a"], dtype)
    first.wake()
    tokens(first.engine, "first")  # this loads every kernel
    first.close()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    bare = torch.cuda.mem_get_info()[0]
    model = make_swapped(checkpoints["a"], dtype)
    model.wake()
    expected = tokens(model.engine, "x")
    runner = model.engine.runner
    storages = [t.untyped_storage() for t in iter_instances(torch.Tensor, runner.model)]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    large = sum(size for size in weights.values() if size >= SEGMENT)
    cache = runner.cache.keys.nbytes + runner.cache.values.nbytes
    assert large >= 2 * 32000 * 512 * dtype.itemsize
    for turn in range(3):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        awake = torch.cuda.mem_get_info()[0]
        copied = model.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        assert asleep - awake >= large + cache
        assert bare - asleep <= LEFT, (bare - asleep) >> 20
        assert copied == (sum(weights.values()) if turn == 0 else 0)
        poison(large + cache)
        model.wake()
        assert not runner.cache.keys.any() and not runner.cache.values.any()
        assert tokens(model.engine, f"{turn}-") == expected
    model.sleep()
    model.close()


def test_models_that_fit_stay_awake(checkpoints: dict[str, Path]) -> None:
    """One model sleeps and wakes while the other has open requests."""
    from emberline.engine.gpu.swap import SleepManager, usable_model_bytes

    models = {name: make_swapped(home, torch.float32) for name, home in checkpoints.items()}
    sleeper = SleepManager(usable_model_bytes(torch.cuda.mem_get_info()[1]))
    for name, model in models.items():
        sleeper.add(name, model)
        sleeper.ensure_awake(name)
    assert sleeper.awake_models == ("a", "b")
    expected = {name: tokens(model.engine, "x") for name, model in models.items()}
    busy, other = models["a"].engine, models["b"]
    for i in range(4):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        busy.add(Submission(f"long{i}", list(range(3, 60 + i)), params))
    for _ in range(5):
        busy.step()
    assert not models["a"].idle
    other.sleep()
    poison(64 << 20)
    busy.step()
    other.wake()
    assert tokens(other.engine, "y") == expected["b"]
    while not busy.idle:
        assert all(o.error is None for o in busy.step())
    assert tokens(busy, "z") == expected["a"]
    for model in models.values():
        model.close()
