"""Penalties and grammars in pipelined steps on a GPU give the same tokens as one request and one step at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from bytelevel import EOS, encode, tokenizer_file
from gpu_settings import gpu_config

from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.grammar import GrammarCompiler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OUT = 40
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sampled")
    tokenizer_file(tiny.write(made, tiny.config("llama", **tiny.GPU_SIZES, eos_token_id=EOS)))
    return made


def engine(checkpoint: Path, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 16, "max_batch_tokens": 256, "max_context": 512, "kv_tokens": 16 * 1024} | settings
    return boot_from_checkpoint(
        checkpoint,
        gpu_config(**chosen),
        dtype=torch.float32,
        make_compiler=lambda folder, config: GrammarCompiler(folder / "tokenizer.json", config.vocab, config.eos),
    ).engine


def requests() -> list[Submission]:
    free = SamplingParams(max_tokens=OUT, top_k=20, seed=5, ignore_eos=True)
    kinds = {
        "plain": free,
        "greedy": replace(free, temperature=0.0, **PENALTIES),
        "drawn": replace(free, **PENALTIES, logit_bias={7: 2.0}, min_tokens=3),
        "json": replace(free, grammar=GrammarSpec("json_schema", json.dumps(OBJECT)), ignore_eos=False),
        "pattern": replace(free, grammar=GrammarSpec("regex", "[a-d]{30}x?"), ignore_eos=False, logprobs=2),
        "both": replace(free, grammar=GrammarSpec("regex", "[a-h ]{1,90}"), **PENALTIES),
    }
    text = encode("the cat sat on the mat and the dog sat on the cat")
    return [Submission(f"{name} {i}", text[: 9 + i], p) for i in range(5) for name, p in kinds.items()]


def run(made: Engine, submissions: list[Submission]) -> dict[str, list[int]]:
    outputs = []
    for submission in submissions:
        made.add(submission)
        outputs += made.step()
    for _ in range(5000):
        if made.idle:
            break
        outputs += made.step()
    assert made.idle and all(o.error is None for o in outputs)
    made.kv.check_invariants()
    tokens: dict[str, list[int]] = {}
    for o in outputs:
        tokens.setdefault(o.id, []).extend(o.tokens)
    return tokens


def test_pipelined_steps_give_the_same_tokens(checkpoint: Path) -> None:
    plain = engine(checkpoint, graphs=False, overlap=False, prefix_cache=False, max_running=1)
    alone: dict[str, list[int]] = {}
    for submission in requests():
        alone |= run(plain, [submission])
    for settings in ({}, {"graphs": False}, {"overlap": False}, {"kv_tokens": 512, "block_size": 16}):
        made = engine(checkpoint, **settings)
        assert run(made, requests()) == alone, settings
        assert bool(made.scheduler.preemptions) == ("kv_tokens" in settings)
