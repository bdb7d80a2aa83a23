"""Measures how often speculative decoding changes tokens, with and without `exact`, and what `exact` costs.

All requests run twice in one engine: without drafts while the number of streams varies, then with drafts in every step
at the maximum number of streams. Half of the requests are greedy, the others are sampled with a seed. A mismatch is the
first token of a request that differs between the two runs; the tokens behind it are not compared. Each mode runs in a
process of its own, so that it gets all of the GPU's memory."""

from __future__ import annotations

import math
import multiprocessing
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from emberline.bench.report import BenchReport
from emberline.core.params import SamplingParams
from emberline.core.request import Submission

if TYPE_CHECKING:
    from emberline.engine.engine import Engine
    from emberline.engine.speculation.drafter import Drafter

PROMPT_LENGTHS = (33, 700)  # tokens of a random prompt
STEP_PROMPT_TOKENS, WARM_UP_STEPS, TIMED_STEPS = 1024, 8, 64  # of the measurement of step times
PHASE_ROUNDS = 2  # the number of streams changes after this many requests of each stream
SEED = 5


@dataclass(frozen=True, slots=True)
class ExactPlan:
    prompts: int
    max_tokens: int
    streams: int  # maximum number of requests at the same time
    max_draft: int
    batches: Sequence[int]  # batch sizes of which the step time is measured
    rounds: int  # measurements of each step time


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The results of one mode: with or without `exact`."""

    tokens: int  # compared tokens
    mismatches: int  # requests whose tokens differ
    drafted: int
    accepted: int
    step_ms: Mapping[int, list[float]]  # milliseconds of a decode step in each round, by batch size
    kernels: str

    @property
    def mismatches_per_100k(self) -> float:
        return 1e5 * self.mismatches / max(1, self.tokens)


def bench(model: str | None, plan: ExactPlan, **settings: Any) -> BenchReport:
    """Run the benchmark. `model`: None for Llama 3.1 8B with random weights. `settings`: further engine settings."""
    report = BenchReport("exact")
    modes: dict[bool, ModeResult] = {}
    for exact in (False, True):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            modes[exact] = process.submit(measure_mode, model, plan, settings | {"exact": exact}).result()
    report.config = {"model": model or "llama-8b, random weights", "kernels": modes[True].kernels, **settings}
    report.config |= {"prompts": plan.prompts, "max_tokens": plan.max_tokens, "streams": plan.streams}
    report.config |= {"max_draft": plan.max_draft, "rounds": plan.rounds}
    add_results(report, modes[False], modes[True])
    return report


def add_results(report: BenchReport, normal: ModeResult, exact: ModeResult) -> None:
    """Add the results of both modes to the report."""
    for prefix, result in (("spec", normal), ("spec_exact", exact)):
        report.add(f"{prefix}_tokens", result.tokens, "tokens")
        report.add(f"{prefix}_mismatches", result.mismatches, "requests")
        report.add(f"{prefix}_mismatch_per_100k", result.mismatches_per_100k, "per 100k tokens")
        report.add(f"{prefix}_accepted", 100 * result.accepted / max(1, result.drafted), "%")
        report.add(f"{prefix}_drafted", result.drafted, "tokens")
    for batch, normal_ms in normal.step_ms.items():
        exact_ms = exact.step_ms[batch]
        report.add(f"step_b{batch}", normal_ms, "ms")
        report.add(f"exact_step_b{batch}", exact_ms, "ms")
        ratios = [ours / base for ours, base in zip(exact_ms, normal_ms, strict=True)]
        report.add(f"exact_step_ratio_b{batch}", ratios, "x")


def measure_mode(model: str | None, plan: ExactPlan, settings: Mapping[str, Any]) -> ModeResult:
    """Boot an engine with these settings, run all requests without and with drafts, and compare their tokens."""
    drafting = {"speculate": "ngram", "max_draft": plan.max_draft}
    engine, prompts, kernels = _boot(model, plan, {"prefix_cache": False, **drafting, **settings})
    engine.scheduler.drafter = None
    submissions = [_make_submission(i, prompt, plan) for i, prompt in enumerate(prompts)]
    counts = sorted({1, 2, 3, 5, 8, 17, 33, plan.streams} & set(range(1, plan.streams + 1)))
    began = time.perf_counter()
    expected = _run(engine, submissions, counts, "plain")
    _print_progress("without drafts", began, settings)
    drafter = engine.scheduler.drafter = _make_forced_drafter(engine, plan)
    # The drafts of every second pair of requests come from its own output, so that many of them are accepted.
    predicted = [
        replace(submission, prediction=tuple(expected[i])) if i // 2 % 2 else submission
        for i, submission in enumerate(submissions)
    ]
    began = time.perf_counter()
    outputs = _run(engine, predicted, [plan.streams], "drafted")
    _print_progress("with drafts", began, settings)
    engine.scheduler.drafter = None
    tokens, mismatches = compare_outputs(expected, outputs)
    steps = {batch: [_measure_step(engine, batch) for _ in range(plan.rounds)] for batch in plan.batches}
    engine.close()
    return ModeResult(tokens, mismatches, drafter.drafted_tokens, drafter.accepted_tokens, steps, kernels)


def _print_progress(name: str, began: float, settings: Mapping[str, Any]) -> None:
    mode = "exact" if settings.get("exact") else "normal"
    print(
        f"requests completed: mode={mode} {name} seconds={time.perf_counter() - began:.1f}", file=sys.stderr, flush=True
    )


def compare_outputs(expected: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of tokens compared, each request up to its first mismatch, and the number of mismatches."""
    tokens = mismatches = 0
    for ours, theirs in zip(expected, outputs, strict=True):
        shorter = min(len(ours), len(theirs))
        equal = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        differs = equal < max(len(ours), len(theirs))
        tokens += equal + differs
        mismatches += differs
    return tokens, mismatches


def _boot(model: str | None, plan: ExactPlan, settings: dict[str, Any]) -> tuple[Engine, list[list[int]], str]:
    """Return the engine, the prompts, and the name of its kernels."""
    if model is None:
        from emberline.bench.gpu import engine as gpu_engine

        chosen = {"max_context": 8192, "max_running": 256, "max_batch_tokens": 8192, **settings}
        booted = gpu_engine.boot_engine(chosen)
        return booted.engine, _make_random_prompts(plan.prompts, gpu_engine.VOCAB), "cuda"
    from emberline.bench import speculation
    from emberline.engine.llm import LLM

    llm = LLM(model, **settings)
    half = -(-plan.prompts // 2)
    texts = [make(half) for make in speculation.PROMPT_SETS.values()]
    mixed = [text for pair in zip(*texts, strict=False) for text in pair][: plan.prompts]
    return llm.engine, [speculation.encode_prompt(llm, text) for text in mixed], llm.loaded.kernels


def _make_random_prompts(count: int, vocab: int) -> list[list[int]]:
    """Return prompts of random tokens. A third of each repeats its beginning, so that n-grams propose drafts."""
    rng = random.Random(SEED)
    prompts = []
    for _ in range(count):
        tokens = [rng.randrange(3, vocab) for _ in range(rng.randint(*PROMPT_LENGTHS))]
        prompts.append(tokens + tokens[: len(tokens) // 2])
    return prompts


def _make_submission(index: int, prompt: list[int], plan: ExactPlan) -> Submission:
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=float(index % 2), seed=SEED + index)
    return Submission(str(index), prompt, params)


def _make_forced_drafter(engine: Engine, plan: ExactPlan) -> Drafter:
    """Return a drafter that verifies every draft, whether it pays or not."""
    from emberline.engine.speculation.drafter import Drafter
    from emberline.engine.speculation.ngram import NgramProposer
    from emberline.engine.speculation.prediction import PredictionProposer
    from emberline.engine.speculation.suffix import SuffixProposer
    from emberline.kernels.cpu.library import find_library

    library = find_library()
    proposer = NgramProposer() if library is None else SuffixProposer(library)
    max_rows = engine.config.max_running
    return Drafter([PredictionProposer(), proposer], plan.max_draft, max_rows=max_rows, adaptive=False)


def _run(engine: Engine, submissions: Sequence[Submission], streams: Sequence[int], name: str) -> list[list[int]]:
    """Complete all submissions and return their tokens. `streams`: numbers of requests at a time, used in turn."""
    outputs: list[list[int]] = [[] for _ in submissions]
    phases = cycle(count for count in streams for _ in range(PHASE_ROUNDS * count))
    limits = list(islice(phases, len(submissions)))  # for each submission, the streams with it at most
    added = is_open = 0
    while added < len(submissions) or is_open:
        while added < len(submissions) and is_open < limits[added]:
            engine.add(replace(submissions[added], id=f"{name}-{added}", timeout=math.inf))
            added, is_open = added + 1, is_open + 1
        for output in engine.step():
            assert output.error is None, output.error
            outputs[int(output.id.rpartition("-")[2])] += output.tokens
            is_open -= output.finish is not None
    return outputs


def _measure_step(engine: Engine, batch: int) -> float:
    """Return the milliseconds of a decode step with this many requests."""
    rng = random.Random(SEED)
    params = SamplingParams(max_tokens=WARM_UP_STEPS + TIMED_STEPS + 8, temperature=0.0, ignore_eos=True)
    ids = [f"step-{batch}-{i}-{time.monotonic_ns()}" for i in range(batch)]
    length = min(STEP_PROMPT_TOKENS, engine.max_context // 2)
    for name in ids:
        engine.add(Submission(name, [rng.randrange(3, 1000) for _ in range(length)], params))
    counts = dict.fromkeys(ids, 0)

    def run_until(num_tokens: int) -> float:
        while min(counts.values()) < num_tokens:
            for output in engine.step():
                counts[output.id] += len(output.tokens)
        return time.perf_counter()

    first = run_until(WARM_UP_STEPS)
    start = min(counts.values())
    seconds = run_until(start + TIMED_STEPS) - first
    while not engine.idle:
        engine.step()
    return 1e3 * seconds / TIMED_STEPS
