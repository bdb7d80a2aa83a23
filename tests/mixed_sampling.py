"""A tiny model on a GPU, and requests with many kinds of sampling: plain, penalties, biases and grammars."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import tiny
import torch
from bytelevel import EOS, encode, tokenizer_file
from gpu_settings import gpu_config

from emberline.core.params import GrammarSpec, SamplingParams
from emberline.core.request import Submission
from emberline.engine.engine import Engine
from emberline.engine.grammar import GrammarCompiler

MAX_TOKENS = 40
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def write_checkpoint(directory: Path) -> Path:
    tokenizer_file(tiny.write(directory, tiny.config("llama", **tiny.GPU_SIZES, eos_token_id=EOS)))
    return directory


def make_engine(checkpoint: Path, *, dtype: torch.dtype = torch.float32, **settings: object) -> Engine:
    from emberline.engine.gpu.boot import boot_from_checkpoint

    chosen = {"max_running": 16, "max_batch_tokens": 256, "max_context": 512, "kv_tokens": 16 * 1024} | settings
    return boot_from_checkpoint(
        checkpoint,
        gpu_config(**chosen),
        dtype=dtype,
        make_compiler=lambda folder, config: GrammarCompiler(folder / "tokenizer.json", config.vocab, config.eos),
    ).engine


def make_submissions(count: int) -> list[Submission]:
    """Return `count` submissions of each kind."""
    free = SamplingParams(max_tokens=MAX_TOKENS, top_k=20, seed=5, ignore_eos=True)
    kinds = {
        "plain": free,
        "greedy": replace(free, temperature=0.0, **PENALTIES),
        "sampled": replace(free, **PENALTIES, logit_bias={7: 2.0}, min_tokens=3),
        "json": replace(free, grammar=GrammarSpec("json_schema", json.dumps(OBJECT)), ignore_eos=False),
        "pattern": replace(free, grammar=GrammarSpec("regex", "[a-d]{30}x?"), ignore_eos=False, logprobs=2),
        "both": replace(free, grammar=GrammarSpec("regex", "[a-h ]{1,90}"), **PENALTIES),
    }
    text = encode("the cat sat on the mat and the dog sat on the cat")
    return [Submission(f"{name} {i}", text[: 9 + i], p) for i in range(count) for name, p in kinds.items()]
