"""The engine on a GPU: the same tokens however a request is computed, and the same numbers as transformers."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from engine_runs import run_engine
from gpu_settings import gpu_config

from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (3, 130, 700, 64, 65, 31, 257, 1)
OUT = 60
KINDS = {
    "llama": tiny.config("llama", **tiny.GPU_SIZES),
    "wide": tiny.config(
        "llama", **(tiny.GPU_SIZES | {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1})
    ),
    "mistral": tiny.config("mistral", sliding_window=100, **tiny.GPU_SIZES),
    "qwen3": tiny.config("qwen3", **tiny.GPU_SIZES),
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.write(tmp_path_factory.mktemp(request.param), KINDS[request.param]))


def engine(checkpoint: Path, dtype: torch.dtype, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 16, "max_batch_tokens": 1024, "max_context": 2048, "kv_tokens": 64 * 1024} | settings
    return boot_from_checkpoint(checkpoint, gpu_config(**chosen), dtype=dtype).engine


def submissions(params: SamplingParams) -> list[Submission]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 1000) for _ in range(64)]
    prompts = [(shared + [rng.randrange(3, 1000) for _ in range(n)])[:n] for n in LENGTHS]
    return [Submission(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalised", "biased"])
def test_tokens_do_not_depend_on_scheduling(checkpoint: Path, kind: str) -> None:
    """In float32 rounding errors are smaller than the differences between logits that these seeds meet.

    With a thousand candidates two logits are sometimes closer: 5e-6 with seed 4 and no top_k, 2e-4 as configured."""
    params = {
        "greedy": SamplingParams(max_tokens=OUT, temperature=0.0),
        "seeded": SamplingParams(max_tokens=OUT, temperature=1.2, top_p=0.95, top_k=50, min_p=0.01, seed=12),
        "penalised": SamplingParams(max_tokens=OUT, seed=3, repetition_penalty=1.3, frequency_penalty=0.2),
        "biased": SamplingParams(max_tokens=OUT, top_k=20, seed=5, logit_bias={7: 5.0, 8: -100.0}, min_tokens=5),
    }[kind]
    if kind in ("penalised", "biased") and "llama" not in checkpoint.name:
        pytest.skip("the model makes no difference to these")
    exact = torch.float32
    alone: dict[str, list[int]] = {}
    plain = engine(checkpoint, exact, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    for submission in submissions(params):
        alone |= run_engine(plain, [submission])
    variants = {
        "eager": run_engine(engine(checkpoint, exact, graphs=False), submissions(params)),
        "graphs": run_engine(engine(checkpoint, exact), submissions(params), steps_between=1),
        "graphs, plain loop": run_engine(engine(checkpoint, exact, overlap=False), submissions(params)),
        "small chunks": run_engine(
            engine(checkpoint, exact, max_batch_tokens=48), submissions(params), steps_between=2
        ),
        "small blocks": run_engine(engine(checkpoint, exact, block_size=16), submissions(params)),
    }
    tight = engine(checkpoint, exact, kv_tokens=896, block_size=16)
    variants["preempted"] = run_engine(tight, submissions(params))
    assert tight.scheduler.preemptions > 0, "the cache was meant to be too small"
    for variant, got in variants.items():
        assert got == alone, variant


def scores(e: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    for i, prompt in enumerate(prompts):
        e.add(Submission(f"s{i}", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
    found: dict[str, torch.Tensor] = {}
    while not e.idle:
        for o in e.step():
            if o.prompt_logprobs is not None:
                found[o.id] = torch.tensor([p.logprob for p in o.prompt_logprobs])
    return [found[f"s{i}"] for i in range(len(prompts))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_those_of_transformers(checkpoint: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    prompts = [s.prompt for s in submissions(SamplingParams()) if len(s.prompt) > 1]
    exact = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).cuda().eval()

    def reference(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([prompt], device="cuda")
            logits = model(ids).logits[0, :-1].double().log_softmax(-1)
            return logits.gather(1, ids[0, 1:, None])[:, 0].cpu()

    for chunk in (1024, 100):
        ours = scores(engine(checkpoint, dtype, max_batch_tokens=chunk), prompts)
        for prompt, got in zip(prompts, ours, strict=True):
            want = reference(exact, prompt)
            error = (got - want).abs().max().item()
            bound = 1e-4 if dtype is torch.float32 else 2 * (reference(theirs, prompt) - want).abs().max().item() + 0.02
            assert error <= bound, (len(prompt), chunk, error, bound)


def test_bf16_steps_of_one_token_agree_with_chunks(checkpoint: Path) -> None:
    """Generated tokens, from kernels for single tokens, are scored again as a prompt, by kernels for chunks."""
    e = engine(checkpoint, torch.bfloat16)
    params = SamplingParams(max_tokens=OUT, temperature=0.8, seed=1, logprobs=0, ignore_eos=True)
    logprobs: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    given = submissions(params)
    for s in given:
        e.add(s)
    while not e.idle:
        for o in e.step():
            tokens.setdefault(o.id, []).extend(o.tokens)
            logprobs.setdefault(o.id, []).extend(p.logprob for p in o.logprobs)
    again = scores(engine(checkpoint, torch.bfloat16), [s.prompt + tokens[s.id] for s in given])
    for s, score in zip(given, again, strict=True):
        got = torch.tensor(logprobs[s.id])
        errors = (got - score[-OUT:]).abs()
        assert errors.mean().item() < 0.05 and errors.max().item() < 0.3, (len(s.prompt), errors)


def test_float8_keys_cost_little(checkpoint: Path) -> None:
    prompts = [s.prompt for s in submissions(SamplingParams()) if len(s.prompt) > 1]
    wide = scores(engine(checkpoint, torch.bfloat16), prompts)
    narrow = scores(engine(checkpoint, torch.bfloat16, kv_dtype="float8"), prompts)
    errors = torch.cat([(a - b).abs() for a, b in zip(wide, narrow, strict=True)])
    # Attention of these models is far sharper than that of trained ones; wrong keys would change a score by about 5.
    assert 0 < errors.mean().item() < 0.6


def test_random_arrivals_and_aborts_end_exactly_once(checkpoint: Path) -> None:
    e = engine(checkpoint, torch.bfloat16, kv_tokens=4096, max_batch_tokens=256)
    rng = random.Random(1)
    expected: list[str] = []
    outputs: list[Output] = []
    for i in range(200):
        if rng.random() < 0.5:
            name = f"r{i}"
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 600))]
            params = SamplingParams(max_tokens=rng.randrange(1, 60), seed=i, ignore_eos=True)
            e.add(Submission(name, prompt, params))
            expected.append(name)
        if expected and rng.random() < 0.2:
            e.abort(rng.choice(expected))
        outputs += e.step()
        e.kv.check_invariants()
    while not e.idle:
        outputs += e.step()
        e.kv.check_invariants()
    assert Counter(o.id for o in outputs if o.finish) == Counter(expected)
    assert e.kv.num_free_blocks + e.kv.num_cached_blocks == e.kv.num_blocks
