"""Speculative decoding with recurrent layers: tokens and log-probabilities equal those without drafts, to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_delta
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from draft_oracle import DraftOracle
from gpu_settings import gpu_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_speculation_on_models import SETTINGS, make_params, outputs_of, run

from emberline.core.engine_config import EngineConfig, SchedulerConfig
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.kv_shape import make_kv_shape, make_state_shape
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.drafter import Drafter
from emberline.engine.speculation.ngram import NgramProposer
from emberline.engine.speculation.prediction import PredictionProposer
from emberline.engine.state_memory import count_state_slots
from emberline.kv.cache import KVCache, StateCache
from emberline.kv.layer_groups import LayerGroups
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

CONTEXT, MAX_RUNNING, MAX_DRAFT = 128, 8, 6
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": CONTEXT}
CASES = ("next", "dense")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in CASES:
        made[name] = tmp_path_factory.mktemp(name)
        tiny_delta.write(made[name], name, **SIZES)
        tokenizer_file(made[name])
    return made


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, DecoderModel]:
    return {name: load_decoder(directory, "bfloat16") for name, directory in directories.items()}


def make_engine(
    model: DecoderModel,
    drafter: Drafter | None,
    tokenizer: Path,
    *,
    blocks: int = 96,
    slots: int = 24,
    budget: int = 256,
    prefix_cache: bool = True,
    pipelined: bool = False,
    graphs: bool = False,
) -> Engine:
    """`pipelined`: with the runner for GPUs, on the CPU."""
    c, eos, shape = model.config, frozenset({EOS}), make_state_shape(model.config)
    assert shape is not None
    groups = LayerGroups.with_states(c.layers, c.parts.attention.state_layers)
    states = StateCache(shape, slots, has_padding_slot=pipelined, num_draft_slots=MAX_RUNNING, max_draft=MAX_DRAFT)
    for memory in (states.conv, states.matrices, states.draft_conv, states.draft_rule):
        memory.fill_(float("nan"))  # what a request did not write, it must not read
    if pipelined:
        states.conv[:, slots] = states.matrices[:, slots] = 0.0
    config = SchedulerConfig(
        block_size=8,
        max_batch_tokens=budget,
        max_running=MAX_RUNNING,
        max_context=CONTEXT,
        prefix_cache=prefix_cache,
    )
    cache = KVCache(make_kv_shape(c, 8, torch.bfloat16, groups), blocks)
    compiler = partial(GrammarCompiler, tokenizer, c.vocab, [EOS])
    if pipelined:
        gpu, factory = gpu_config(max_running=MAX_RUNNING, max_batch_tokens=budget, graphs=graphs), SamplingStateFactory
        runner = GPURunner(
            model, cache, eos, factory(eos, compiler), gpu, HostDevice(), CONTEXT, groups=groups, states=states
        )
        return Engine(config, runner, drafter=drafter)
    return Engine(config, TorchRunner(model, cache, eos, compiler, groups=groups, states=states), drafter=drafter)


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(CASES),
    chosen=st.lists(st.tuples(st.sampled_from(sorted(SETTINGS)), st.integers(1, 60)), min_size=1, max_size=4),
    blocks=st.sampled_from([24, 96]),
    slots=st.sampled_from([2, 24]),
    budget=st.sampled_from([16, 256]),
    pipelined=st.booleans(),
    graphs=st.booleans(),
    gap=st.integers(0, 3),
    right=st.lists(st.booleans(), min_size=1, max_size=6),
    max_draft=st.integers(1, MAX_DRAFT),
    seed=st.integers(0, 3),
)
def test_tokens_equal_those_without_drafts(
    models: dict[str, DecoderModel],
    directories: dict[str, Path],
    name: str,
    chosen: list[tuple[str, int]],
    blocks: int,
    slots: int,
    budget: int,
    pipelined: bool,
    graphs: bool,
    gap: int,
    right: list[bool],
    max_draft: int,
    seed: int,
) -> None:
    """Chunks of prompts, preemption, prefix hits from snapshots, several choices, with all settings of sampling.

    The second round finds the prompts and outputs of the first one in the cache."""
    submissions = [
        Submission(f"r{i}", encode(f"{setting} {'x' * length}"), make_params(setting, max_tokens=18, seed=seed))
        for i, (setting, length) in enumerate(chosen)
    ]
    make = partial(make_engine, models[name], tokenizer=directories[name] / "tokenizer.json")
    plain = make(None, prefix_cache=False, slots=1)
    expected = {key: one for s in submissions for key, one in run(plain, [s]).items()}
    max_rows = MAX_RUNNING if pipelined else None
    oracle = DraftOracle(outputs_of(expected), right, VOCAB_SIZE)
    drafter = Drafter([oracle], max_draft, max_rows=max_rows, adaptive=False)
    e = make(drafter, blocks=blocks, slots=slots, budget=budget, pipelined=pipelined, graphs=graphs)
    assert run(e, submissions, gap) == expected
    assert run(e, submissions, gap) == expected


def test_right_drafts_are_accepted_with_every_setting(
    models: dict[str, DecoderModel], directories: dict[str, Path]
) -> None:
    make = partial(make_engine, models["next"], tokenizer=directories["next"] / "tokenizer.json")
    for name in SETTINGS:
        submission = Submission("r", encode("some text"), make_params(name, max_tokens=20, seed=1))
        expected = run(make(None), [submission])
        drafter = Drafter([DraftOracle(outputs_of(expected))], 3, adaptive=False)
        assert run(make(drafter), [submission]) == expected
        rejected = drafter.drafted_tokens - drafter.accepted_tokens  # behind the end of the output
        assert drafter.accepted_tokens > 0 and rejected < 3, name


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_next_turn_of_a_chat_starts_behind_an_answer_with_drafts(
    models: dict[str, DecoderModel], directories: dict[str, Path], pipelined: bool
) -> None:
    """The snapshots that drafted steps make are those of the tokens that became output."""
    make = partial(make_engine, models["next"], tokenizer=directories["next"] / "tokenizer.json")
    params = SamplingParams(max_tokens=45, temperature=0.9, seed=3, ignore_eos=True)
    prompt = encode("some text that is long enough")
    expected = run(make(None), [Submission("r", prompt, params)])
    answer = expected["r", 0][0]
    follow_up = Submission("next", [*prompt, *answer, 7, 8, 9], params)
    alone = run(make(None, prefix_cache=False), [follow_up])
    for right in ([True], [True, True, False, True]):
        oracle, max_rows = (
            DraftOracle(outputs_of(expected | alone), right, VOCAB_SIZE),
            MAX_RUNNING if pipelined else None,
        )
        e = make(Drafter([oracle], 4, max_rows=max_rows, adaptive=False), pipelined=pipelined)
        assert run(e, [Submission("r", prompt, params)]) == expected
        hits = e.kv.hit_tokens
        assert run(e, [follow_up]) == alone, right
        assert e.kv.hit_tokens - hits >= len(prompt) + len(answer) - 16


def test_prediction_and_forced_tokens_are_drafted(
    models: dict[str, DecoderModel], directories: dict[str, Path]
) -> None:
    make = partial(make_engine, models["dense"], tokenizer=directories["dense"] / "tokenizer.json")
    grammar = GrammarSpec("regex", "(aaa|bbb) is the answer that was asked for")
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=2, grammar=grammar)
    submission = Submission("r", encode("some text"), params)
    drafter = Drafter([], 6, adaptive=False)
    assert run(make(drafter), [submission]) == run(make(None), [submission])
    assert drafter.accepted_tokens == drafter.drafted_tokens > 25
    params = make_params("seeded", max_tokens=60, seed=3)
    expected = run(make(None), [Submission("r", encode("some text"), params)])
    output = expected["r", 0][0]
    drafter = Drafter([PredictionProposer(), NgramProposer()], 4, adaptive=False)
    edited = (7, *output[:30], 8, 9, *output[32:])
    assert run(make(drafter), [Submission("r", encode("some text"), params, prediction=edited)]) == expected
    assert drafter.accepted_tokens > 15


@pytest.mark.parametrize("speculate", ["ngram", "suffix", "draft"])
def test_booted_engines(directories: dict[str, Path], tmp_path: Path, speculate: str) -> None:
    """With their own choice of how many tokens are drafted, and a draft model that has no states."""
    if speculate == "draft":
        tiny.write(tmp_path, tiny.config("llama", **SIZES))
        tokenizer_file(tmp_path)
        speculate = f"draft:{tmp_path}"
    settings = {"device": "cpu", "block_size": 8, "kv_memory": 1 << 21, "threads": 1, "max_running": 4}
    config = EngineConfig.build(str(directories["next"]), **settings)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, allowed_token_ids=(40, 41))
    submissions = [Submission(f"r{i}", encode("some text" * (i + 1)), params) for i in range(3)]
    loaded = boot(config.with_settings(speculate=speculate))
    runner = loaded.engine.runner
    assert isinstance(runner, TorchRunner) and runner.states is not None
    assert (
        loaded.kv_bytes == runner.cache.num_blocks * runner.cache.shape.block_bytes + runner.states.num_bytes <= 1 << 21
    )
    assert run(loaded.engine, submissions) == run(boot(config).engine, submissions)
    stats = loaded.engine.stats().speculation
    assert stats is not None and stats.drafted_tokens > 0


def test_rows_of_drafts_are_part_of_the_memory(models: dict[str, DecoderModel]) -> None:
    shape = make_state_shape(models["next"].config)
    assert shape is not None
    states = StateCache(shape, 3, num_draft_slots=2, max_draft=5)
    rows = states.draft_conv.nbytes + states.draft_rule.nbytes
    assert rows == 10 * shape.draft_bytes and states.num_bytes == 3 * shape.slot_bytes + rows
    for running, memory in ((4, 1 << 20), (40, 1 << 20), (400, 1 << 20)):
        slots = count_state_slots(shape.slot_bytes, memory, running, draft_bytes=8 * shape.draft_bytes)
        used = slots * shape.slot_bytes + min(slots, running) * 8 * shape.draft_bytes
        assert used <= memory // 2 and (
            slots == 3 * running or used + shape.slot_bytes + 8 * shape.draft_bytes > memory // 2
        )
