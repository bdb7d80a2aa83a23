"""Engines of every family sample the same tokens in every layout of ranks as on one rank, with gloo between the ranks.

The ranks are threads of this process; test_ranks.py has processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny
from bytelevel import EOS, VOCAB_SIZE, tokenizer_file
from rank_engines import make_thread_engine
from rank_models import WRITERS
from sample_tokenizers import smollm2

from emberline import LLM
from emberline.core.engine_config import EngineConfig
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.engine.engine import Engine
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.settings import check_divisible
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

SETTINGS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "dtype": "float32", "kv_memory": 1 << 20, "block_size": 8, "max_context": 64,
    "max_batch_tokens": 16, "max_running": 4,
}  # fmt: skip
ALL_LAYOUTS = [Layout(tp, pp, ep) for tp in (1, 2, 4) for pp in (1, 2) for ep in (1, 2) if tp * pp > 1 and ep <= tp]
# All of them take 10 minutes, with EMBERLINE_ALL_LAYOUTS=1. test_rank_models.py has models of all families on 2 and 4
# ranks, with and without divided experts.
SOME_LAYOUTS = [Layout(1, 2), Layout(4, 2), Layout(4, 2, 2)]
LAYOUTS = ALL_LAYOUTS if os.environ.get("EMBERLINE_ALL_LAYOUTS") else SOME_LAYOUTS
NUM_BLOCKS = 10, 5  # of the first group of layers, and of others: too few for all requests, so some are preempted
PREFIX = [5, 9, 17, 4, 80, 33, 9, 21, 6, 14]  # more than a block
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0.0, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.8, seed=11, n=2, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.9, seed=3, repetition_penalty=1.3, min_p=0.02, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.0, prompt_logprobs=1, allowed_token_ids=tuple(range(3, 60))),
    SamplingParams(max_tokens=20, temperature=0.7, seed=5, logprobs=2, frequency_penalty=0.5, ignore_eos=True),
]
LENGTHS = (3, 21, 30, 19, 26)


def make_submissions() -> list[Submission]:
    prompts = [(PREFIX + [3 + (7 * i + j) % 90 for j in range(n)])[:n] for i, n in enumerate(LENGTHS)]
    pairs = zip(prompts, PARAMS, strict=True)
    return [Submission(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(pairs)]


class EngineRun:
    """What an engine answers, and what it went through."""

    def __init__(self, engine: Engine, pending: list[Submission]) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[float]] = {}
        self.cached_tokens = 0
        waiting = list(pending)
        while waiting or not engine.idle:
            if waiting:
                engine.add(waiting.pop(0))
            for output in engine.step():
                assert output.error is None
                key = output.id, output.index
                self.tokens.setdefault(key, []).extend(output.tokens)
                scores = [*(output.prompt_logprobs or ()), *output.logprobs]
                self.logprobs.setdefault(key, []).extend(each.logprob for each in scores)
                self.cached_tokens += output.cached_tokens
        engine.kv.check_invariants()
        self.preemptions = engine.scheduler.preemptions
        engine.close()


def can_divide(layout: Layout, model: ModelConfig) -> bool:
    """Whether this layout is one of the model's. All models here can be divided, except that some have no experts."""
    has_experts = model.experts is not None and any(model.experts.layers)
    if layout.ep > 1 and not has_experts:
        return False
    check_divisible(layout, model)
    return True


def compare_layouts(config: EngineConfig, layouts: list[Layout], pending: list[Submission]) -> list[EngineRun]:
    """Compare each layout with one rank, and return the runs."""
    expected = EngineRun(boot(config).engine, pending)
    assert any(expected.logprobs.values())
    runs = []
    for layout in layouts:
        divided = config.with_settings(tp=layout.tp, pp=layout.pp, ep=layout.ep)
        run = EngineRun(make_thread_engine(divided, over_gloo=True, max_blocks=NUM_BLOCKS), pending)
        assert run.tokens == expected.tokens, layout
        for key, scores in expected.logprobs.items():
            assert run.logprobs[key] == pytest.approx(scores, abs=1e-4), (layout, key)
        runs.append(run)
    return runs


@pytest.mark.parametrize("name", WRITERS)
def test_layouts_of_each_family(name: str, tmp_path: Path) -> None:
    """Greedy and sampled, in chunks, with cached prefixes, and with a cache so small that requests are preempted."""
    WRITERS[name](tmp_path)
    config = EngineConfig.build(str(tmp_path), **SETTINGS)
    model = ModelConfig.from_checkpoint(Checkpoint.open(tmp_path))
    layouts = [layout for layout in LAYOUTS if can_divide(layout, model)]
    if len(layouts) == len(SOME_LAYOUTS):
        layouts.remove(Layout(4, 2))  # with experts, the one that divides them too
    assert len(layouts) >= 2
    runs = compare_layouts(config, layouts, make_submissions())
    if not any(model.windows):  # with windows, requests free blocks as they advance
        assert any(run.preemptions for run in runs)
    if model.parts.attention.state is None:  # states are cached at fewer places
        assert any(run.cached_tokens for run in runs)


def test_grammars(tmp_path: Path) -> None:
    config = tiny.config("llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, num_attention_heads=8)
    tokenizer_file(tiny.write(tmp_path, config))
    patterns = ["[a-c]{3}x[0-9]+", "(yes|no), [A-Z]{2,9}", "[0-9]{4}-[0-9]{2}"]
    pending = [
        Submission(f"r{i}", [7, 8, 9 + i], SamplingParams(max_tokens=9, seed=i, logprobs=0, grammar=grammar))
        for i, grammar in enumerate(GrammarSpec("regex", pattern) for pattern in patterns)
    ]
    compare_layouts(EngineConfig.build(str(tmp_path), **SETTINGS), [Layout(2), Layout(1, 2), Layout(4, 2)], pending)


def test_smollm2() -> None:
    """Real weights, in processes: 200 greedy tokens, of one request or of 8. SmolLM2 has 9 heads and 3 KV heads."""
    settings = {"device": "cpu", "threads": 1, "dtype": "float32", "kv_memory": 64 << 20}
    prompts = ["The capital of France is"]
    if not os.environ.get("EMBERLINE_ALL_LAYOUTS"):
        prompts += ["def fibonacci(n):", "Once upon a time", "1, 2, 3,", "The", "Dear", "import", "2 + 2 ="]
    params = SamplingParams(max_tokens=200 // len(prompts), temperature=0.0, ignore_eos=True)
    tokens = []
    for layout in ({}, {"tp": 3}, {"pp": 2}):
        with LLM(str(smollm2()), **settings, **layout) as llm:
            tokens.append([each.tokens for each in llm.generate(prompts, params, progress=False)])
    assert sum(map(len, tokens[0])) == 200 and tokens == [tokens[0]] * 3
