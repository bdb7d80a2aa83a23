"""Engines with recurrent layers: the same tokens however a request is computed, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import tiny_delta
import torch
from engine_runs import run_engine
from paged_model import Cache

from emberline.cli.__main__ import main
from emberline.core.engine_config import EngineConfig, SchedulerConfig
from emberline.core.errors import ModelError, UnsupportedModel
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.drafter.target import TargetStates
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.runner import TorchRunner
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.state_manager import StateKVManager
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

BLOCK, CONTEXT = 8, 256
Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    directory = tmp_path_factory.mktemp("model")
    tiny_delta.write(directory, getattr(request, "param", "next"))
    return load_decoder(directory, "bfloat16")


def make_engine(
    model: DecoderModel, *, blocks: int = 400, slots: int = 24, budget: int = 64, prefix_cache: bool = True
) -> Engine:
    c, shape = model.config, make_state_shape(model.config)
    assert shape is not None
    groups = LayerGroups.with_states(c.layers, c.parts.attention.state_layers)
    cache = KVCache(KVShape(groups.block_layers, c.kv_heads, c.head_dim, BLOCK, torch.float32), blocks)
    states = StateCache(shape, slots)
    states.conv.fill_(float("nan"))  # a new request must not read what its slot contained
    states.matrices.fill_(float("nan"))
    config = SchedulerConfig(
        block_size=BLOCK, max_batch_tokens=budget, max_running=8, max_context=CONTEXT, prefix_cache=prefix_cache
    )
    return Engine(config, TorchRunner(model, cache, frozenset(), groups=groups, states=states))


def states_of(engine: Engine) -> StateKVManager:
    assert isinstance(engine.kv, StateKVManager)
    return engine.kv


def run(e: Engine, pending: list[Submission], steps_between: int = 0) -> Tokens:
    outputs: list[Output] = []
    for submission in pending:
        e.add(submission)
        for _ in range(steps_between):
            outputs += e.step()
            e.kv.check_invariants()
    while not e.idle:
        outputs += e.step()
        e.kv.check_invariants()
    tokens: Tokens = {}
    for output in outputs:
        assert output.error is None, output.error
        tokens.setdefault((output.id, output.index), []).extend(output.tokens)
    slots = states_of(e).states
    assert slots.num_free + slots.num_snapshots == slots.total, "an ended request holds a slot"
    return tokens


def make_submissions(count: int = 6, max_tokens: int = 30, **params: object) -> list[Submission]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 90, (70,), generator=generator).tolist()
    lengths = [5, 90, 140, 70, 150, 81][:count]
    return [
        Submission(
            f"r{i}",
            (shared + torch.randint(3, 90, (length,), generator=generator).tolist())[:length],
            SamplingParams(max_tokens=max_tokens, temperature=float(i % 2), seed=i, ignore_eos=True, **params),  # type: ignore[arg-type]
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("model", ["next", "dense"], indirect=True)
def test_tokens_depend_on_nothing_but_the_request(model: DecoderModel) -> None:
    expected: Tokens = {}
    for submission in make_submissions():
        expected |= run(make_engine(model, prefix_cache=False, budget=CONTEXT), [submission])
    first = make_submissions()[0]
    greedy = list(first.prompt)
    for _ in range(4):
        greedy.append(int(Cache(model, [greedy]).step([len(greedy)])[-1].argmax()))
    assert expected["r0", 0][:4] == greedy[len(first.prompt) :]
    variants = {
        "together": (make_engine(model), 0),
        "chunked": (make_engine(model, budget=16), 2),
        "without prefix cache": (make_engine(model, prefix_cache=False), 1),
        "few slots": (make_engine(model, slots=3), 1),
    }
    for name, (e, between) in variants.items():
        assert run(e, make_submissions(), between) == expected, name
    ops.set_threads(2)
    assert run(make_engine(model, budget=48), make_submissions()) == expected, "two threads"
    ops.set_threads(1)
    again = make_engine(model)
    assert run(again, make_submissions()) == expected
    hits = again.kv.hit_tokens
    renamed = [Submission(f"again-{s.id}", s.prompt, s.params) for s in make_submissions()]
    assert {(k[0].removeprefix("again-"), k[1]): v for k, v in run(again, renamed).items()} == expected
    assert again.kv.hit_tokens - hits == 88 + 136 + 64 + 144 + 64  # 80 is too near to 64 for a snapshot


def test_tokens_after_preemptions(model: DecoderModel) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=4, ignore_eos=True)
    submissions = [Submission(f"r{i}", [3 + i, *range(10, 30)], params) for i in range(6)]
    expected = run(make_engine(model), submissions)
    for slots in (24, 6):
        tight = make_engine(model, blocks=40, slots=slots, budget=32)
        assert run(tight, submissions) == expected
        assert tight.scheduler.preemptions > 0


def test_choices_start_from_a_snapshot_of_the_prompt(model: DecoderModel) -> None:
    expected = run(make_engine(model, prefix_cache=False, slots=1), make_submissions(3, n=3))
    for prefix_cache in (True, False):
        e = make_engine(model, prefix_cache=prefix_cache)
        assert run(e, make_submissions(3, n=3)) == expected
        assert e.kv.hit_tokens >= 2 * (88 + 136)


def test_the_next_turn_of_a_chat_starts_behind_the_answer(model: DecoderModel) -> None:
    e = make_engine(model)
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    prompt = [5 + i % 80 for i in range(75)]
    answer = run(e, [Submission("first", prompt, params)])["first", 0]
    follow_up = [*prompt, *answer, 7, 8, 9]
    hits = e.kv.hit_tokens
    found = run(e, [Submission("second", follow_up, params)])["second", 0]
    assert e.kv.hit_tokens - hits == 88  # of 75 + 20 computed tokens
    assert found == run(make_engine(model), [Submission("alone", follow_up, params)])["alone", 0]


def test_the_third_request_starts_behind_a_shared_system_prompt(model: DecoderModel) -> None:
    e = make_engine(model)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    system, cached = [5 + i % 80 for i in range(100)], []
    for i in range(4):
        hits = e.kv.hit_tokens
        run(e, [Submission(f"r{i}", [*system, *[90 + i] * 30], params)])
        cached.append(e.kv.hit_tokens - hits)
    assert cached == [0, 0, 96, 96]


def test_an_aborted_request_frees_its_slot(model: DecoderModel) -> None:
    e = make_engine(model, slots=2)
    for submission in make_submissions(3):
        e.add(submission)
    for _ in range(3):
        e.step()
    for submission in make_submissions(3):
        e.abort(submission.id)
    run_engine(e, [])
    assert states_of(e).states.num_free + states_of(e).states.num_snapshots == 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    tiny_delta.write(directory, "next")
    return directory


def test_a_booted_engine_keeps_states_within_its_memory(directory: Path) -> None:
    settings = {"device": "cpu", "block_size": 8, "kv_memory": 1 << 20, "max_running": 8, "threads": 1}
    loaded = boot(EngineConfig.build(str(directory), **settings))
    runner, slots = loaded.engine.runner, states_of(loaded.engine).states
    assert isinstance(runner, TorchRunner) and runner.states is not None
    assert slots.total == runner.states.num_slots == 24 and runner.states.num_bytes == 24 * 8928
    assert loaded.kv_bytes == runner.states.num_bytes + runner.cache.num_blocks * runner.cache.shape.block_bytes
    assert (1 << 20) - runner.cache.shape.block_bytes < loaded.kv_bytes <= 1 << 20
    prompt = [5 + i % 80 for i in range(75)]
    expected = list(prompt)
    for _ in range(6):
        expected.append(int(Cache(runner.model, [expected]).step([len(expected)])[-1].argmax()))
    params = SamplingParams(max_tokens=6, temperature=0.0)
    assert run_engine(loaded.engine, [Submission("r", prompt, params)])["r"] == expected[75:]
    assert run_engine(loaded.engine, [Submission("r2", prompt, params)])["r2"] == expected[75:]
    assert loaded.engine.stats().prefix_hits == 72
    few = boot(EngineConfig.build(str(directory), **settings | {"kv_memory": 40_000}))
    assert states_of(few.engine).states.total == 2
    with pytest.raises(ModelError, match=r"30000 bytes, and recurrent states of 8928 bytes each get half of it; 1 fit"):
        boot(EngineConfig.build(str(directory), **settings | {"kv_memory": 30_000}))


def test_drafts_refuse_states(directory: Path, tmp_path: Path) -> None:
    target = tiny.write(tmp_path / "target")
    settings = EngineConfig.build(str(target), device="cpu", kv_memory=1 << 20, speculate=f"draft:{directory}")
    with pytest.raises(UnsupportedModel, match="which a draft model does not support"):
        boot(settings)
    with pytest.raises(UnsupportedModel, match="which emberline drafter does not support"):
        TargetStates(load_decoder(directory), (1,), 64)


def test_doctor_counts_states(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--model", str(directory), "--gpu-memory", "80G"])
    printed = capsys.readouterr().out
    assert re.search(r"kv cache +0\.[13] kB per token", printed)  # of the only layer with keys and values
    assert "0.01 MB for each running request and each snapshot" in printed
    assert re.search(r"  states +0\.01 GiB", printed)
    assert re.search(r"  kv cache .* tokens, [\d.]+ full contexts, 768 slots for states\n", printed)
