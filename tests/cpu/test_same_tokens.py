"""The same tokens, bit for bit, however a request is computed: alone, batched, chunked, cached, preempted, threaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_experts
import tiny_families
import torch
from gpu_settings import gpu_config

from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import Admission
from emberline.core.request import FinishReason, Priority, Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.runner import TorchRunner
from emberline.engine.sampler import SamplingState, SamplingStateFactory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels import ops
from emberline.kv.cache import KVCache, KVShape
from emberline.models.decoder import DecoderModel
from emberline.models.loader import load_checkpoint, load_decoder
from emberline.models.weight_form import WeightForm

LENGTHS = (3, 17, 40, 23, 8, 31)
OUT = 12


# Models whose matrices are quantised at load; their rows consist of whole blocks.
BLOCK_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
QUANTISED: dict[str, tuple[tiny.Config, WeightForm]] = {
    "llama-q4": (tiny.CONFIGS["llama"] | BLOCK_SIZES, "q4"),
    "qwen3-moe-q8": (tiny.CONFIGS["qwen3-moe"] | BLOCK_SIZES | {"moe_intermediate_size": 32}, "q8"),
}
NAMES = ["llama", "mistral", "qwen3", "qwen3-moe", "gemma3", "olmo3", "cohere2", "glm4", *QUANTISED]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    home, name = tmp_path_factory.mktemp("model"), request.param
    if name in QUANTISED:
        config, form = QUANTISED[name]
        return load_checkpoint(Checkpoint.open(tiny.write(home, config)), form=form)
    if name in tiny_experts.CONFIGS:
        tiny_experts.write(home, tiny_experts.CONFIGS[name])
    elif name in tiny_families.CONFIGS:
        tiny_families.write(home, name)
    else:
        tiny.write(home, name)
    return load_decoder(Path(home), "bfloat16")


def engine(
    model: DecoderModel,
    blocks: int = 64,
    *,
    budget: int = 256,
    running: int = 16,
    prefix: bool = True,
    ahead: bool = False,
    graphs: bool = False,
) -> Engine:
    c = model.config
    cache = KVCache(KVShape(c.layers, c.kv_heads, c.head_dim, 8, torch.bfloat16), blocks)
    config = SchedulerConfig(
        block_size=8, max_batch_tokens=budget, max_running=running, max_context=64, prefix_cache=prefix
    )
    if not ahead:
        return Engine(config, TorchRunner(model, cache, frozenset()))
    settings = gpu_config(max_running=running, max_batch_tokens=budget, graphs=graphs)
    maker = SamplingStateFactory(frozenset(), None)
    return Engine(config, GPURunner(model, cache, frozenset(), maker, settings, HostDevice(), 64))


def submissions(params: SamplingParams) -> list[Submission]:
    rng = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 131, (16,), generator=rng).tolist()
    prompts = [(shared + torch.randint(3, 131, (n,), generator=rng).tolist())[:n] for n in LENGTHS]
    return [Submission(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


def run(e: Engine, pending: list[Submission], gap: int = 0) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    outputs: list[Output] = []
    for submission in pending:
        e.add(submission)
        for _ in range(gap):
            outputs += e.step()
    while not e.idle:
        outputs += e.step()
    e.kv.check_invariants()
    folded: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for o in outputs:
        tokens, logprobs = folded.setdefault((o.id, o.index), ([], []))
        tokens += o.tokens
        logprobs += [p.logprob for p in o.logprobs]
    return folded


PARAMS = {
    "greedy": SamplingParams(max_tokens=OUT, temperature=0.0, logprobs=0),
    "seeded": SamplingParams(max_tokens=OUT, temperature=1.5, top_p=0.95, top_k=50, seed=11, logprobs=0),
    "penalised": SamplingParams(
        max_tokens=OUT, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=0
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_and_logprobs_do_not_depend_on_scheduling(model: DecoderModel, name: str) -> None:
    params = PARAMS[name]
    alone: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for submission in submissions(params):
        alone |= run(engine(model, prefix=False), [submission])
    ops.set_threads(2 if name == "greedy" else 1)
    variants = {
        "batched": run(engine(model), submissions(params)),
        "chunked": run(engine(model, budget=16, running=4), submissions(params), gap=1),
        "cached": run(engine(model, running=1), submissions(params)),
        "no prefix cache": run(engine(model, prefix=False), submissions(params), gap=2),
    }
    variants |= {
        "ahead": run(engine(model, ahead=True), submissions(params)),
        "ahead, padded": run(engine(model, ahead=True, graphs=True), submissions(params), gap=1),
        "ahead, padded, chunked": run(
            engine(model, budget=16, running=4, ahead=True, graphs=True), submissions(params), gap=2
        ),
        "ahead, chunked": run(engine(model, budget=16, running=4, ahead=True), submissions(params), gap=2),
        "ahead, preempted": run(engine(model, blocks=9, running=6, ahead=True, graphs=True), submissions(params)),
    }
    tight = engine(model, blocks=9, running=6)
    variants["preempted"] = run(tight, submissions(params))
    ops.set_threads(1)
    assert tight.scheduler.preemptions > 0, "the cache was meant to be too small"
    for variant, got in variants.items():
        assert got == alone, variant


def test_first_of_n_equals_n_1_and_all_differ(model: DecoderModel) -> None:
    one = SamplingParams(max_tokens=OUT, temperature=1.5, seed=4)
    many = SamplingParams(max_tokens=OUT, temperature=1.5, seed=4, n=4)
    single = run(engine(model), submissions(one)[2:3])
    several = run(engine(model), submissions(many)[2:3])
    assert several["r2", 0] == single["r2", 0]
    assert len({tuple(tokens) for tokens, _ in several.values()}) == 4


def test_prompt_logprobs_do_not_depend_on_chunks(model: DecoderModel) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)

    def scores(e: Engine) -> list[list[float]]:
        for s in submissions(params):
            e.add(s)
        found: dict[str, list[float]] = {}
        while not e.idle:
            for o in e.step():
                if o.prompt_logprobs is not None:
                    found[o.id] = [p.logprob for p in o.prompt_logprobs]
        return [found[f"r{i}"] for i in range(len(LENGTHS))]

    whole, chunked = scores(engine(model)), scores(engine(model, budget=7, running=4))
    assert whole == chunked == scores(engine(model, budget=7, running=4, ahead=True))
    assert [len(s) for s in whole] == [n - 1 for n in LENGTHS]


def test_more_requests_may_have_started_than_can_run(model: DecoderModel) -> None:
    """Interactive requests overtake a preempted batch request: it keeps its tokens but loses its device row."""
    small, middle, long = (submissions(SamplingParams(max_tokens=OUT, temperature=0.0))[i] for i in (0, 1, 2))
    long = replace(long, priority=Priority.BATCH)
    expected: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for s in (small, middle, long):
        expected |= run(engine(model, prefix=False), [s])
    e = engine(model, blocks=10, running=2, ahead=True, prefix=False)
    e.add(long)
    outputs = e.step() + e.step()
    e.add(middle)
    while not e.scheduler.preemptions and not e.idle:
        outputs += e.step()
    assert [r.submission_id for r in e.scheduler.waiting] == [long.id]
    e.add(small)
    while not e.idle:
        outputs += e.step()
    found: dict[tuple[str, int], list[int]] = {}
    for o in outputs:
        found.setdefault((o.id, o.index), []).extend(o.tokens)
    assert found == {name: tokens for name, (tokens, _) in expected.items()}


class Choosy(SamplingStateFactory):
    def __call__(self, admission: Admission) -> SamplingState:
        if admission.id.startswith("r2"):
            raise InvalidRequest("its grammar takes too long to prepare")
        return super().__call__(admission)


def test_request_that_fails_while_its_next_chunk_is_planned_ends(model: DecoderModel) -> None:
    """The second plan includes the request, because it was made before the first result reported its failure."""
    params = PARAMS["greedy"]
    expected = run(engine(model, prefix=False), submissions(params))
    e = engine(model, budget=16, running=4, prefix=False, ahead=True)
    assert isinstance(e.runner, GPURunner)
    e.runner._make_state = Choosy(frozenset(), None)
    for submission in submissions(params):
        e.add(submission)
    outputs: list[Output] = []
    while not e.idle:
        outputs += e.step()
    e.kv.check_invariants()
    (refused,) = (o for o in outputs if o.id == "r2")
    assert refused.finish is FinishReason.ERROR and "too long" in str(refused.error)
    for i in (0, 1, 3, 4, 5):
        tokens_of_request = [t for o in outputs if o.id == f"r{i}" for t in o.tokens]
        assert tokens_of_request == expected[f"r{i}", 0][0]
