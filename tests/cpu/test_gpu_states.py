"""The runner for GPUs, on the CPU, with recurrent layers: the same tokens as the runner for CPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_delta
import torch
from gpu_settings import gpu_config
from host_engine import simulate_gpu
from test_state_engine import BLOCK, CONTEXT, make_submissions, run, states_of
from test_state_engine import make_engine as make_cpu_engine

from emberline.core.engine_config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.boot import SyncRunner, warm_up
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.gpu.swap import reset_prefix_cache
from emberline.engine.kv_shape import make_state_shape
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.draft_loader import load_draft_model
from emberline.engine.speculation.drafter import Drafter
from emberline.kv.cache import KVCache, KVShape, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.loader import load_decoder
from emberline.models.weights import Weights

EOS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    directory = tiny_delta.write_random(tmp_path_factory.mktemp("model"), tiny_delta.make_config("next"))
    return load_decoder(directory, "float32")


def make_engine(
    model: DecoderModel,
    *,
    blocks: int = 400,
    slots: int = 24,
    budget: int = 64,
    graphs: bool = True,
    pipelined: bool = True,
    prefix_cache: bool = True,
    drafter: Drafter | None = None,
    head: DraftModel | None = None,
) -> Engine:
    """`drafter`, `head`: of an engine that drafts tokens."""
    c, shape = model.config, make_state_shape(model.config)
    assert shape is not None
    groups = LayerGroups.with_states(c.layers, c.parts.attention.state_layers)
    cache = KVCache(KVShape(groups.block_layers, c.kv_heads, c.head_dim, BLOCK, torch.float32), blocks)
    max_draft = 0 if drafter is None else 3
    states = StateCache(shape, slots, has_padding_slot=True, num_draft_slots=8, max_draft=max_draft)
    states.conv[:, :slots] = states.matrices[:, :slots] = float("nan")  # a new request must not read its slot
    limits = {"max_batch_tokens": budget, "max_running": 8}
    config = SchedulerConfig(**limits, block_size=BLOCK, max_context=CONTEXT, prefix_cache=prefix_cache)
    factory = SamplingStateFactory(EOS, None)
    settings = gpu_config(**limits, graphs=graphs)
    if max_draft:
        settings = replace(settings, speculation=SpeculationConfig("mtp", max_draft))
    runner = GPURunner(model, cache, EOS, factory, settings, HostDevice(), CONTEXT, head, groups, states)
    return Engine(config, runner if pipelined else SyncRunner(runner), drafter=drafter)


def test_tokens_are_those_of_the_cpu(model: DecoderModel) -> None:
    expected = run(make_cpu_engine(model), make_submissions())
    variants = {
        "together": (make_engine(model), 0),
        "chunked": (make_engine(model, budget=16), 2),
        "not captured, without prefix cache": (make_engine(model, graphs=False, prefix_cache=False), 1),
        "not pipelined, few slots": (make_engine(model, pipelined=False, slots=3), 1),
        "few slots": (make_engine(model, slots=3), 1),
    }
    for name, (e, between) in variants.items():
        assert run(e, make_submissions(), between) == expected, name
    again, _ = variants["together"]
    hits = again.kv.hit_tokens
    renamed = [Submission(f"again-{s.id}", s.prompt, s.params) for s in make_submissions()]
    assert {(k[0].removeprefix("again-"), k[1]): v for k, v in run(again, renamed).items()} == expected
    assert again.kv.hit_tokens - hits >= 88 + 136 + 64 + 144 + 64
    choices = make_submissions(3, n=3)
    assert run(make_engine(model), choices) == run(make_cpu_engine(model), choices)


def test_tokens_after_preemptions(model: DecoderModel) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=4, ignore_eos=True)
    submissions = [Submission(f"r{i}", [3 + i, *range(10, 30)], params) for i in range(6)]
    expected = run(make_cpu_engine(model), submissions)
    for slots in (24, 6):
        tight = make_engine(model, blocks=40, slots=slots, budget=32)
        assert run(tight, submissions) == expected
        assert tight.scheduler.preemptions > 0


def test_requests_that_end_while_their_next_step_runs(model: DecoderModel) -> None:
    """A step that was planned before its request ended advances a state whose slot already belongs to another one."""
    expected = run(make_cpu_engine(model), make_submissions(max_tokens=3))
    e = make_engine(model, slots=2)
    assert run(e, make_submissions(max_tokens=3), 1) == expected
    for turn in range(3):
        for submission in make_submissions(2):
            e.add(Submission(f"{turn}-{submission.id}", submission.prompt, submission.params))
        for _ in range(2 + turn):
            e.step()
        for submission in make_submissions(2):
            e.abort(f"{turn}-{submission.id}")
    tokens = run(e, make_submissions(max_tokens=3), 1)
    assert {key: tokens[key] for key in expected} == expected


def test_the_next_turn_of_a_chat_starts_after_the_answer(model: DecoderModel) -> None:
    """Its snapshot is planned before the last token of the block is known."""
    e = make_engine(model)
    params = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    prompt = [5 + i % 80 for i in range(75)]
    answer = run(e, [Submission("first", prompt, params)])["first", 0]
    follow_up = [*prompt, *answer, 7, 8, 9]
    hits = e.kv.hit_tokens
    found = run(e, [Submission("second", follow_up, params)])["second", 0]
    assert e.kv.hit_tokens - hits == 88  # of 75 + 20 computed tokens
    assert found == run(make_cpu_engine(model), [Submission("alone", follow_up, params)])["alone", 0]


def test_states_remain_usable_after_sleep_and_warm_up(model: DecoderModel) -> None:
    e = make_engine(model)
    assert isinstance(e.runner, GPURunner) and e.runner.states is not None
    warm_up(e.runner)
    expected = run(make_cpu_engine(model), make_submissions())
    assert run(e, make_submissions()) == expected
    assert any(buffer is e.runner.states.matrices for buffer in e.runner.device_buffers())
    reset_prefix_cache(e)
    assert states_of(e).states.num_snapshots == 0 and run(e, make_submissions()) == expected


def test_a_booted_engine_has_slots_beside_its_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate_gpu(monkeypatch)
    tiny_delta.write_random(tmp_path, tiny_delta.make_config("dense"))
    transfer = TransferConfig("w", required=False)
    settings = {"device": "cuda", "max_running": 4, "kv_memory": 1 << 23, "transfer": transfer}
    loaded = boot(EngineConfig.build(str(tmp_path), **settings))
    runner = loaded.engine.runner
    assert isinstance(runner, GPURunner) and runner.states is not None
    assert states_of(loaded.engine).states.total == runner.num_state_slots == 12
    assert runner.states.num_bytes == 13 * runner.states.shape.slot_bytes
    assert 0.95 * (1 << 23) < loaded.kv_bytes <= 1 << 23
    assert loaded.engine.transfer_endpoint is not None
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert len(run(loaded.engine, [Submission("r", list(range(3, 90)), params)])["r", 0]) == 4
    loaded.engine.close()


def test_a_head_whose_drafts_are_sometimes_right(tmp_path: Path) -> None:
    """With few tokens in the vocabulary, a random head is right often enough. The device counts what was accepted."""
    config = tiny_delta.make_config("next") | {"vocab_size": 8, "eos_token_id": 0}
    directory = tiny_delta.write_random(tmp_path, config, has_head=True)
    model = load_decoder(directory, "float32")
    speculation = SpeculationConfig("mtp", 3)
    head = load_draft_model(speculation, model, directory, lambda checkpoint: Weights(checkpoint, model.dtype))
    assert head is not None
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=4, ignore_eos=True)
    submissions = [Submission(f"r{i}", [(i + j * j) % 8 for j in range(20 + 30 * i)], params) for i in range(4)]
    expected = run(make_engine(model), submissions)
    for options in ({"graphs": False}, {"budget": 16}, {"slots": 3, "blocks": 40}):
        drafter = Drafter([], 3, max_rows=8, adaptive=False, uses_draft_model=True, continues_on_device=True)
        e = make_engine(model, drafter=drafter, head=head, **options)  # type: ignore[arg-type]
        assert run(e, submissions, 2) == expected, options
        assert drafter.accepted_tokens > 15 and drafter.drafted_tokens > 2 * drafter.accepted_tokens
        again = run(e, [replace(s, id=f"again-{s.id}") for s in submissions])
        assert {(name.removeprefix("again-"), n): tokens for (name, n), tokens in again.items()} == expected
