"""Speculative decoding on tiny models: tokens and log-probabilities equal those without drafts, to the bit.

The drafts come from the expected output, with mistakes. The pipelined runner is that of GPUs, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from draft_oracle import DraftOracle
from gpu_settings import gpu_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.engine.speculation.drafter import Drafter
from emberline.engine.speculation.ngram import NgramProposer
from emberline.engine.speculation.prediction import PredictionProposer
from emberline.engine.speculation.suffix import SuffixProposer
from emberline.kernels.cpu.library import find_library
from emberline.kv.cache import KVCache, KVShape
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

CONTEXT = 128
Result = tuple[list[int], list[float], FinishReason | None]
Results = dict[tuple[str, int], Result]
MakeEngine = Callable[..., Engine]
OBJECT = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"abc": {"type": "integer"}}}))
SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.3, "top_p": 0.9, "top_k": 40},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "penalties": {"temperature": 0.5, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "bias": {"temperature": 0.9, "logit_bias": {5: 4.0, 7: -4.0}, "min_tokens": 9, "stop_token_ids": tuple(range(30))},
    "rules": {
        "temperature": 1.0,
        "allowed_token_ids": tuple(range(40, 90)),
        "bad_words": ((50, 51), (60,), (61, 62, 63)),
    },
    "grammar": {"temperature": 1.0, "grammar": OBJECT},
    "grammar and penalties": {"temperature": 1.0, "grammar": OBJECT, "repetition_penalty": 1.2, "logprobs": 1},
    "grammar without an end": {
        "grammar": GrammarSpec("regex", "[a-h ]{1,90}"),
        "ignore_eos": True,
        "repetition_penalty": 1.4,
    },
    "two completions": {"temperature": 1.0, "n": 2},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 1},
}


def make_params(name: str, **others: object) -> SamplingParams:
    return SamplingParams(**SETTINGS[name], **others)  # type: ignore[arg-type]


def outputs_of(results: Results) -> dict[tuple[str, int], list[int]]:
    return {key: tokens for key, (tokens, _, _) in results.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer_file(
        tiny.write(made, tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, max_position_embeddings=CONTEXT))
    )
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> DecoderModel:
    return load_decoder(directory, "bfloat16")


@pytest.fixture(scope="module")
def make_engine(model: DecoderModel, directory: Path) -> MakeEngine:
    c, eos = model.config, frozenset({EOS})
    compiler = partial(GrammarCompiler, directory / "tokenizer.json", c.vocab, [EOS])

    def make(
        drafter: Drafter | None, *, pipelined: bool = False, graphs: bool = False, blocks: int = 96, budget: int = 256
    ) -> Engine:
        cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.bfloat16), blocks)
        config = SchedulerConfig(block_size=8, max_batch_tokens=budget, max_running=8, max_context=CONTEXT)
        if not pipelined:
            return Engine(config, TorchRunner(model, cache, eos, compiler), drafter=drafter)
        gpu = gpu_config(max_running=8, max_batch_tokens=budget, graphs=graphs)
        runner = GPURunner(model, cache, eos, SamplingStateFactory(eos, compiler), gpu, HostDevice(), CONTEXT)
        return Engine(config, runner, drafter=drafter)

    return make


def run(e: Engine, submissions: Sequence[Submission], gap: int = 0) -> Results:
    outputs: list[Output] = []
    for submission in submissions:
        e.add(submission)
        for _ in range(gap):
            outputs += e.step()
    while not e.idle:
        outputs += e.step()
    e.kv.check_invariants()
    found: Results = {}
    for o in outputs:
        tokens, logprobs, _ = found.get((o.id, o.index), ([], [], None))
        found[o.id, o.index] = ([*tokens, *o.tokens], [*logprobs, *(p.logprob for p in o.logprobs)], o.finish)
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.tuples(st.sampled_from(sorted(SETTINGS)), st.integers(1, 60)), min_size=1, max_size=4),
    pipelined=st.booleans(),
    graphs=st.booleans(),
    blocks=st.sampled_from([24, 96]),
    budget=st.sampled_from([16, 256]),
    gap=st.integers(0, 3),
    right=st.lists(st.booleans(), min_size=1, max_size=6),
    max_draft=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_tokens_equal_those_without_drafts(
    make_engine: MakeEngine,
    chosen: list[tuple[str, int]],
    pipelined: bool,
    graphs: bool,
    blocks: int,
    budget: int,
    gap: int,
    right: list[bool],
    max_draft: int,
    seed: int,
) -> None:
    submissions = [
        Submission(f"r{i}", encode(f"{name} {'x' * length}"), make_params(name, max_tokens=24, seed=seed))
        for i, (name, length) in enumerate(chosen)
    ]
    expected = {key: one for s in submissions for key, one in run(make_engine(None), [s]).items()}
    drafter = Drafter(
        [DraftOracle(outputs_of(expected), right, VOCAB_SIZE)],
        max_draft,
        max_rows=8 if pipelined else None,
        adaptive=False,
    )
    e = make_engine(drafter, pipelined=pipelined, graphs=graphs, blocks=blocks, budget=budget)
    assert run(e, submissions, gap) == expected


@pytest.mark.parametrize("pipelined", [False, True])
def test_right_drafts_are_accepted_with_every_setting(make_engine: MakeEngine, pipelined: bool) -> None:
    for name in SETTINGS:
        submission = Submission("r", encode("some text"), make_params(name, max_tokens=40, seed=1))
        expected = run(make_engine(None), [submission])
        drafter = Drafter([DraftOracle(outputs_of(expected))], 3, max_rows=8 if pipelined else None, adaptive=False)
        assert run(make_engine(drafter, pipelined=pipelined), [submission]) == expected
        rejected = drafter.drafted_tokens - drafter.accepted_tokens  # behind the end of the output
        assert drafter.accepted_tokens > 0 and rejected < 3, name


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_drafts_of_a_repetitive_text_are_accepted(make_engine: MakeEngine, pipelined: bool, kind: str) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, allowed_token_ids=(40, 41))
    submission = Submission("r", encode("some text"), params)
    expected = run(make_engine(None), [submission])
    library = find_library()
    assert library is not None
    drafter = Drafter([NgramProposer() if kind == "ngram" else SuffixProposer(library)], 4, adaptive=False)
    assert run(make_engine(drafter, pipelined=pipelined), [submission]) == expected
    assert drafter.accepted_tokens > 20


def test_suffix_drafts_from_earlier_outputs_of_the_same_tenant_only(make_engine: MakeEngine) -> None:
    library = find_library()
    assert library is not None
    drafter = Drafter([SuffixProposer(library)], 8, adaptive=False)
    e = make_engine(drafter)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    first = run(e, [Submission("a", encode("some text"), params, salt="one")])
    before = drafter.accepted_tokens
    assert run(e, [Submission("b", encode("some text"), params, salt="two")])["b", 0] == first["a", 0]
    assert drafter.accepted_tokens - before <= before
    before = drafter.accepted_tokens
    assert run(e, [Submission("c", encode("some text"), params, salt="one")])["c", 0] == first["a", 0]
    assert drafter.accepted_tokens - before > 40


@pytest.mark.parametrize("pipelined", [False, True])
def test_forced_tokens_of_a_grammar_are_drafted(make_engine: MakeEngine, pipelined: bool) -> None:
    """Without any proposer: only the grammar drafts, here all of a long literal except where a token is chosen."""
    grammar = GrammarSpec("regex", "(aaa|bbb) is the answer that was asked for")
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=2, grammar=grammar)
    submission = Submission("r", encode("some text"), params)
    expected = run(make_engine(None), [submission])
    drafter = Drafter([], 8, adaptive=False)
    assert run(make_engine(drafter, pipelined=pipelined), [submission]) == expected
    assert drafter.accepted_tokens == drafter.drafted_tokens > 25


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_output_that_left_the_prediction_returns_to_it(make_engine: MakeEngine, kind: str) -> None:
    library = find_library()
    assert library is not None
    params = make_params("seeded", max_tokens=60, seed=3)
    expected = run(make_engine(None), [Submission("r", encode("some text"), params)])
    output = expected["r", 0][0]
    assert len(output) == 60
    accepted = {}
    for name, prediction in (("edited", [7, *output[:30], 8, 9, *output[32:]]), ("none", [])):
        own = NgramProposer() if kind == "ngram" else SuffixProposer(library)
        drafter = Drafter([PredictionProposer(), own], 4, adaptive=False)
        submission = Submission("r", encode("some text"), params, prediction=tuple(prediction))
        assert run(make_engine(drafter), [submission]) == expected
        accepted[name] = drafter.accepted_tokens
    assert accepted["edited"] > 25 and accepted["edited"] > accepted["none"] + 20, accepted
