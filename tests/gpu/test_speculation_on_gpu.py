"""Speculative decoding on a GPU: in float32, drafts never change the tokens, with captured and uncaptured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from bytelevel import EOS, VOCAB_SIZE, encode, tokenizer_file
from draft_oracle import DraftOracle
from gpu_settings import gpu_config

from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.speculation.drafter import Drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OUT = 40
RUNNING = 32
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drafted")
    tokenizer_file(tiny.write(made, tiny.config("llama", **tiny.GPU_SIZES, eos_token_id=EOS)))
    return made


def make_engine(checkpoint: Path, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": RUNNING, "max_batch_tokens": 256, "max_context": 512, "kv_tokens": 16 * 1024} | settings
    return boot_from_checkpoint(
        checkpoint,
        gpu_config(**chosen),
        dtype=torch.float32,
        make_compiler=lambda folder, config: GrammarCompiler(folder / "tokenizer.json", config.vocab, config.eos),
    ).engine


def make_submissions() -> list[Submission]:
    free = SamplingParams(max_tokens=OUT, top_k=20, seed=5, ignore_eos=True)
    kinds = {
        "plain": free,
        "greedy": replace(free, temperature=0.0, **PENALTIES),
        "sampled": replace(free, **PENALTIES, logit_bias={7: 2.0}, min_tokens=3),
        "json": replace(free, grammar=GrammarSpec("json_schema", json.dumps(OBJECT)), ignore_eos=False),
        "pattern": replace(free, grammar=GrammarSpec("regex", "[a-d]{30}x?"), ignore_eos=False, logprobs=2),
        "both": replace(free, grammar=GrammarSpec("regex", "[a-h ]{1,90}"), **PENALTIES),
    }
    text = encode("the cat sat on the mat and the dog sat on the cat")
    return [Submission(f"{name} {i}", text[: 9 + i], p) for i in range(3) for name, p in kinds.items()]


def run(e: Engine, submissions: list[Submission]) -> Tokens:
    outputs = []
    for submission in submissions:
        e.add(submission)
        outputs += e.step()
    for _ in range(5000):
        if e.idle:
            break
        outputs += e.step()
    assert e.idle and all(o.error is None for o in outputs)
    e.kv.check_invariants()
    tokens: Tokens = {}
    for o in outputs:
        tokens.setdefault((o.id, o.index), []).extend(o.tokens)
    return tokens


def test_drafts_never_change_the_tokens(checkpoint: Path) -> None:
    plain = make_engine(checkpoint, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    alone: Tokens = {}
    for submission in make_submissions():
        alone |= run(plain, [submission])
    for settings in ({}, {"graphs": False}, {"overlap": False}, {"kv_tokens": 512, "block_size": 16}):
        for right in ((True,), (True, True, False), (False,)):
            e = make_engine(checkpoint, **settings)
            drafter = Drafter([DraftOracle(alone, right, VOCAB_SIZE)], 4, max_rows=RUNNING, adaptive=False)
            e.scheduler.drafter = drafter
            assert run(e, make_submissions()) == alone, (settings, right)
            assert drafter.drafted_tokens > 0
            assert drafter.accepted_tokens > 100 or not any(right)
