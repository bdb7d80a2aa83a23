"""Measures decoding with penalties and with a JSON grammar, compared with plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from emberline.bench import workload
from emberline.bench.gpu.job_run import CONFIG, VOCAB, JobRun, SteadyPhase
from emberline.bench.job import BenchJob
from emberline.bench.report import BenchReport
from emberline.core.params import GrammarSpec, SamplingParams

if TYPE_CHECKING:  # needs llguidance
    from emberline.engine.grammar import GrammarCompiler

BATCHES = (1, 8, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 128
ITEM_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
LONG_ARRAY_GRAMMAR = GrammarSpec("json_schema", json.dumps({"type": "array", "items": ITEM_SCHEMA, "minItems": 200}))
SAMPLING_KINDS = {
    "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2),
    "json": SamplingParams(grammar=LONG_ARRAY_GRAMMAR),
}
WORD_LETTERS, SPACE = 'etaoinshrdlucmfwypvbgkqjxzETAOINSHRDL0123456789_-,."{}[]:', "\u0120"
NAMES = tuple(f"{kind}_b{batch}" for kind in SAMPLING_KINDS for batch in BATCHES)


def measure(
    report: BenchReport,
    run_job: Callable[[BenchJob, SamplingParams], JobRun],
    measurement_name: str,
    rounds: int,
) -> None:
    """Add the step times with and without one sampling feature, and the extra time per request, to the report.

    `measurement_name` selects the feature: penalties or a JSON grammar.
    """
    kind, _, size = measurement_name.rpartition("_b")
    batch = int(size)
    job = workload.make_job([(PROMPT_TOKENS, OUTPUT_TOKENS)] * batch, VOCAB)

    def measure_steps(params: SamplingParams) -> list[float]:
        run_job(workload.make_job([(32, 4)] * batch, VOCAB), params)  # warm-up
        return [SteadyPhase.from_timeline(job, run_job(job, params).timeline).step_seconds for _ in range(rounds)]

    plain, ours = measure_steps(SamplingParams()), measure_steps(SAMPLING_KINDS[kind])
    report.add(f"{measurement_name}_ms", [1e3 * step for step in ours], "ms", peer=1e3 * min(plain))
    report.add(f"{measurement_name}_plain_ms", [1e3 * step for step in plain], "ms")
    report.add(f"{measurement_name}_us_per_row", 1e6 * (min(ours) - min(plain)) / batch, "us")


@cache
def make_grammar_compiler() -> GrammarCompiler:
    """Return a grammar compiler for a synthetic vocabulary of Llama 3.1's size."""
    from emberline.engine.grammar import GrammarCompiler

    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(_make_tokenizer(VOCAB, CONFIG.vocab)))
        return GrammarCompiler(file, CONFIG.vocab, CONFIG.eos)


def _make_tokenizer(num_words: int, vocab_size: int) -> dict[str, object]:
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    found = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    drawn = rng.integers(0, len(WORD_LETTERS), (2 * num_words, 8)).tolist()
    for letters, size, spaced in zip(
        drawn, rng.integers(2, 9, 2 * num_words), rng.random(2 * num_words) < 0.5, strict=True
    ):
        if len(found) < num_words:
            found[SPACE * bool(spaced) + "".join(WORD_LETTERS[i] for i in letters[:size])] = None
    special = [
        {"id": i, "content": f"<|special_{i}|>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i in range(num_words, vocab_size)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(found)}, "merges": []},
    }
