"""Penalties and grammars in pipelined steps, which start before the host has the tokens of the previous step.

The tokens equal those of one step at a time on the host, and no extra steps are needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from gpu_settings import gpu_config

from emberline.core.engine_config import SchedulerConfig
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.plan import Admission, StepPlan, StepResult, WorkItem
from emberline.core.request import Priority, Submission
from emberline.engine.engine import Engine, GrammarRunner
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.grammar import GrammarCompiler, fill_masks
from emberline.engine.penalties import PenaltyCounts
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingStateFactory
from emberline.kernels import backend, ops
from emberline.kernels.reference import IN_PROMPT_BIT, MAX_TOKEN_COUNT
from emberline.kv.cache import KVCache, KVShape
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_decoder

OUT = 14
CONTEXT = 64
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
OBJECT = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer_file(tiny.write(made, tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS)))
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> DecoderModel:
    return load_decoder(directory, "float32")


class CountingRunner(GPURunner):
    """Counts the launches that compute something."""

    launches = 0

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.launches += bool(plan.work)
        return super().launch(plan)


@pytest.fixture
def engine(model: DecoderModel, directory: Path) -> Callable[..., Engine]:
    c, eos = model.config, frozenset({EOS})
    compiler = partial(GrammarCompiler, directory / "tokenizer.json", c.vocab, [EOS])

    def make(
        *, ahead: bool = True, blocks: int = 64, running: int = 8, budget: int = 256, graphs: bool = False
    ) -> Engine:
        cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.float32), blocks)
        config = SchedulerConfig(block_size=8, max_batch_tokens=budget, max_running=running, max_context=CONTEXT)
        if not ahead:
            return Engine(config, TorchRunner(model, cache, eos, compiler))
        settings = gpu_config(max_running=running, max_batch_tokens=budget, graphs=graphs)
        rows = SamplingStateFactory(eos, compiler)
        return Engine(config, CountingRunner(model, cache, eos, rows, settings, HostDevice(), CONTEXT))

    return make


def requests() -> list[Submission]:
    """Return requests of every kind for one batch."""
    free = SamplingParams(max_tokens=OUT, temperature=1.2, seed=5, ignore_eos=True)
    kinds = {
        "plain": free,
        "greedy": replace(free, temperature=0.0, **PENALTIES),
        "drawn": replace(free, **PENALTIES, logit_bias={7: 2.0}, min_tokens=3),
        "several": replace(free, **PENALTIES, n=3),
        "json": replace(free, grammar=OBJECT, ignore_eos=False),
        "pattern": replace(free, grammar=GrammarSpec("regex", "[a-d]{9}x?"), ignore_eos=False, logprobs=2),
        "choice": replace(free, grammar=GrammarSpec("choice", '["yes", "no"]')),
        "both": replace(free, grammar=GrammarSpec("regex", "[a-h ]{1,40}"), **PENALTIES),
    }
    text = encode("the cat sat on the mat and the dog sat on the cat")
    return [Submission(name, text[: 9 + 4 * i], p) for i, (name, p) in enumerate(kinds.items())]


def run(engine: Engine, submissions: list[Submission], gap: int = 0) -> Tokens:
    outputs = []
    for submission in submissions:
        engine.add(submission)
        outputs += [output for _ in range(gap) for output in engine.step()]
    while not engine.idle:
        outputs += engine.step()
    engine.kv.check_invariants()
    tokens: Tokens = {}
    for o in outputs:
        assert o.error is None
        tokens.setdefault((o.id, o.index), []).extend(o.tokens)
    return tokens


@pytest.fixture
def expected(engine: Callable[..., Engine]) -> Tokens:
    """Return the outputs of one request and one step at a time."""
    tokens: Tokens = {}
    for submission in requests():
        tokens |= run(engine(ahead=False), [submission])
    return tokens


@pytest.mark.parametrize(
    ("settings", "gap"),
    [
        ({}, 0),
        ({"graphs": True}, 1),
        ({"budget": 16, "running": 4, "graphs": True}, 2),
        ({"blocks": 12, "running": 6}, 1),
        ({"ahead": False, "blocks": 16}, 0),
    ],
    ids=["batched", "padded", "chunked", "preempted", "host"],
)
def test_pipelined_steps_give_the_same_tokens(
    engine: Callable[..., Engine], expected: Tokens, settings: dict[str, int], gap: int
) -> None:
    made = engine(**settings)
    assert isinstance(made.runner, GrammarRunner)
    for grammar in [s.params.grammar for s in requests() if s.params.grammar is not None]:
        made.runner.prepare(grammar).result(60)  # else the number of running requests would depend on the machine
    assert run(made, requests(), gap) == expected
    assert bool(made.scheduler.preemptions) == ("blocks" in settings)


@pytest.mark.parametrize("name", ["drawn", "json", "both"])
def test_resumed_output_counts_for_penalties(engine: Callable[..., Engine], expected: Tokens, name: str) -> None:
    (submission,) = (s for s in requests() if s.id == name)
    tokens = expected[name, 0]
    resumed = replace(submission, resumed=(tuple(tokens[:3]),))
    assert run(engine(), [resumed])[name, 0] == tokens[3:]


@pytest.mark.parametrize(("name", "blocks"), [("greedy", 5), ("both", 8)])
def test_counts_are_rebuilt_after_another_request_used_the_row(
    engine: Callable[..., Engine], expected: Tokens, name: str, blocks: int
) -> None:
    """A preempted batch request loses its row on the device to an interactive one with penalties."""
    (long,) = (replace(s, priority=Priority.BATCH) for s in requests() if s.id == name)
    first, second = (replace(s, id=f"other {i}") for i in range(2) for s in requests() if s.id == "drawn")
    made = engine(blocks=blocks, running=2)
    made.add(long)
    outputs = []
    while not outputs:
        outputs += made.step()
    made.add(first)
    while not made.scheduler.preemptions and not made.idle:
        outputs += made.step()
    assert [r.submission_id for r in made.scheduler.waiting] == [name]
    made.add(second)
    while not made.idle:
        outputs += made.step()
    assert [t for o in outputs if o.id == name for t in o.tokens] == expected[name, 0]
    for other in (first, second):
        assert [t for o in outputs if o.id == other.id for t in o.tokens] == expected["drawn", 0]


@pytest.mark.parametrize("name", ["greedy", "pattern", "both"])
def test_penalties_and_grammars_need_no_extra_steps(engine: Callable[..., Engine], expected: Tokens, name: str) -> None:
    """An engine that waited for each token would need twice as many calls."""
    count = len(expected[name, 0])
    submission = {s.id: s for s in requests()}[name]
    plain = replace(requests()[0], prompt=submission.prompt, params=SamplingParams(max_tokens=count, ignore_eos=True))

    def count_calls(asked: Submission) -> int:
        made, steps, seen = engine(), 0, 0
        made.add(asked)
        while not seen:  # a grammar is compiled in another thread
            seen = sum(len(o.tokens) for o in made.step())
        while not made.idle:
            made.step()
            steps += 1
        assert isinstance(made.runner, CountingRunner)
        assert made.runner.launches <= count + 1  # one more if the last token was read after the next step was launched
        return steps

    assert (
        count_calls(submission) <= count_calls(plain) + 2
    )  # two if the last token was read while another step was in flight


def test_device_counts_equal_host_counts() -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(**PENALTIES)
    vocab, prompt = 301, rng.integers(0, 60, 40).tolist()
    host = PenaltyCounts(params, prompt, len(prompt))
    counts = torch.zeros(3, 304, dtype=torch.int16)
    counts[2, prompt] = IN_PROMPT_BIT
    settings = torch.tensor([[params.repetition_penalty, params.frequency_penalty, params.presence_penalty]])
    row, slot = torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    for _ in range(150):
        token = int(rng.integers(0, vocab))
        host.add(token)
        ops.count_tokens(counts, slot, row, torch.tensor([0, token]))
        logits = torch.from_numpy(rng.standard_normal((2, vocab)).astype(np.float32))
        wanted = logits.clone()
        host.apply(wanted[1].numpy())
        ops.apply_penalties(logits, row, slot, settings, counts)
        assert torch.equal(logits, wanted) and not counts[:2].any()


def test_counts_saturate() -> None:
    token, few = torch.tensor([4]), torch.tensor([0], dtype=torch.int32)
    counts = torch.zeros(1, 8, dtype=torch.int16)
    counts[0, 4] = IN_PROMPT_BIT + MAX_TOKEN_COUNT
    ops.count_tokens(counts, few, few, token)
    assert counts[0, 4] == -1
    host = PenaltyCounts(SamplingParams(frequency_penalty=1.0), [4] * (MAX_TOKEN_COUNT + 2), 0)
    logits = np.zeros(8, np.float32)
    host.apply(logits)
    assert logits[4] == -MAX_TOKEN_COUNT


def test_masks_computed_in_parallel_equal_single_ones(directory: Path) -> None:
    compiler = GrammarCompiler(directory / "tokenizer.json", VOCAB_SIZE, [EOS])
    matchers = [compiler.compile(GrammarSpec("regex", f"{c}[0-9]+")) for c in "abcde"]
    alone, together = (np.full((5, compiler.mask_words), -1, np.int32) for _ in range(2))
    for matcher, mask in zip(matchers, alone, strict=True):
        matcher.fill_mask(mask)
    fill_masks(matchers, together)
    assert np.array_equal(alone, together) and len(np.unique(alone, axis=0)) == 5


@pytest.mark.parametrize("native", [True, False])
def test_progress_counter_grows_within_a_step(directory: Path, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter grows at least once in each layer, so that a long step can be distinguished from a hang."""
    if not native:
        monkeypatch.setattr(backend, "_backend", ops.ReferenceBackend("asked for"))
    elif ops.start_backend().library is None:
        pytest.skip("there is no native library here")
    model = load_decoder(directory, "float32")
    c = model.config
    cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.float32), 8)
    runner = TorchRunner(model, cache, frozenset())
    before = ops.progress_count()
    params = SamplingParams(max_tokens=1)
    work = WorkItem("a", 0, [1, 2, 3], [0], samples=True)
    runner.run(StepPlan(1, [Admission("a", [1, 2, 3], 3, params, 0)], [work], []))
    assert ops.progress_count() - before >= c.layers
