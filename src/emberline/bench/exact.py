"""Measures how often speculative decoding changes tokens, with and without `exact`, and what `exact` costs.

All requests run twice in one engine: without drafts while the number of streams varies, then with drafts in every step
at the maximum number of streams. Half of the requests are greedy, the others are sampled with a seed. A mismatch is the
first token of a request that differs between the two runs; the tokens behind it are not compared. Each mode runs in a
process of its own, so that it gets all of the GPU's memory. At a time limit, the tokens generated until then count."""

from __future__ import annotations

import math
import multiprocessing
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from emberline.bench.report import BenchReport
from emberline.core.params import SamplingParams
from emberline.core.request import Submission

if TYPE_CHECKING:
    from emberline.engine.engine import Engine
    from emberline.engine.speculation.drafter import Drafter

PROMPT_LENGTHS = (33, 700)  # tokens of a random prompt; short ones are more frequent
STEP_PROMPT_TOKENS, WARM_UP_STEPS, TIMED_STEPS = 1024, 8, 64  # of the measurement of step times
STREAM_COUNTS = (1, 3, 8, 33)  # numbers of streams without drafts, besides the maximum; each is used equally long
PLAIN_SHARE = 0.45  # share of a mode's time for the requests without drafts
SEED = 5
MODES = {"normal": "spec", "exact": "spec_exact"}  # modes and the prefixes of their results


@dataclass(frozen=True, slots=True)
class ExactPlan:
    prompts: int
    max_tokens: int
    streams: int  # maximum number of requests at the same time
    max_draft: int
    batches: Sequence[int]  # batch sizes of which the step time is measured
    rounds: int  # measurements of each step time
    seconds: float = math.inf  # for both modes together, with their boots


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The results of one mode: with or without `exact`."""

    tokens: int  # compared tokens
    mismatches: int  # requests whose tokens differ
    requests: int  # compared requests
    drafted: int
    accepted: int
    step_ms: Mapping[int, list[float]]  # milliseconds of a decode step in each round, by batch size
    kernels: str

    @property
    def mismatches_per_100k(self) -> float:
        return 1e5 * self.mismatches / max(1, self.tokens)


def bench(model: str | None, plan: ExactPlan, **settings: Any) -> BenchReport:
    """Run the benchmark. `model`: None for Llama 3.1 8B with random weights. `settings`: further engine settings.

    If one of the two modes fails, the report has the results of the other mode, and the error in its config."""
    report = BenchReport("exact", {"model": model or "llama-8b, random weights", **settings})
    report.config |= {"prompts": plan.prompts, "max_tokens": plan.max_tokens, "streams": plan.streams}
    report.config |= {"max_draft": plan.max_draft, "rounds": plan.rounds}
    modes: dict[str, ModeResult] = {}
    end = time.time() + plan.seconds
    for i, mode in enumerate(MODES):
        until = time.time() + (end - time.time()) / (len(MODES) - i)
        chosen = settings | {"exact": mode == "exact"}
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                modes[mode] = process.submit(measure_mode, model, plan, chosen, until).result()
        except Exception as error:  # of any kind: the other mode's results are kept
            reason = report.config.setdefault("failed", {})[mode] = f"{type(error).__name__}: {error}"
            print(f"mode failed: mode={mode} reason={reason}", file=sys.stderr, flush=True)
            continue
        report.config["kernels"] = modes[mode].kernels
        _print_progress(mode, "compared", tokens=modes[mode].tokens, mismatches=modes[mode].mismatches)
    add_results(report, modes)
    return report


def add_results(report: BenchReport, modes: Mapping[str, ModeResult]) -> None:
    """Add the results of the modes, `normal` or `exact`, to the report."""
    for mode, result in modes.items():
        prefix = MODES[mode]
        report.add(f"{prefix}_tokens", result.tokens, "tokens")
        report.add(f"{prefix}_mismatches", result.mismatches, "requests")
        report.add(f"{prefix}_mismatch_per_100k", result.mismatches_per_100k, "per 100k tokens")
        report.add(f"{prefix}_requests", result.requests, "requests")
        report.add(f"{prefix}_accepted", 100 * result.accepted / max(1, result.drafted), "%")
        report.add(f"{prefix}_drafted", result.drafted, "tokens")
        for batch, step_ms in result.step_ms.items():
            report.add(f"{'exact_' * (mode == 'exact')}step_b{batch}", step_ms, "ms")
    if modes.keys() == MODES.keys():
        for batch, normal_ms in modes["normal"].step_ms.items():
            ratios = [ours / base for ours, base in zip(modes["exact"].step_ms[batch], normal_ms, strict=True)]
            report.add(f"exact_step_ratio_b{batch}", ratios, "x")


def measure_mode(
    model: str | None, plan: ExactPlan, settings: Mapping[str, Any], until: float = math.inf
) -> ModeResult:
    """Boot an engine with these settings, run requests without and with drafts, and compare their tokens.

    `until`: time (as time.time()) at which requests that are still running are ended."""
    began, mode = time.time(), "exact" if settings.get("exact") else "normal"
    drafting = {"speculate": "ngram", "max_draft": plan.max_draft}
    engine, prompts, kernels = _boot(model, plan, {"prefix_cache": False, **drafting, **settings})
    engine.scheduler.drafter = None
    _print_progress(mode, "booted", seconds=time.time() - began)
    steps = {batch: [_measure_step(engine, batch) for _ in range(plan.rounds)] for batch in plan.batches}
    _print_progress(mode, "step times measured", seconds=time.time() - began)
    submissions = [_make_submission(i, prompt, plan) for i, prompt in enumerate(prompts)]
    counts = sorted(count for count in {*STREAM_COUNTS, plan.streams} if count <= plan.streams)
    without_drafts = time.time() + PLAIN_SHARE * (until - time.time())
    expected = _run(engine, submissions, counts, "plain", without_drafts)
    _print_progress(mode, "requests without drafts ended", seconds=time.time() - began, requests=len(expected))
    drafter = engine.scheduler.drafter = _make_forced_drafter(engine, plan)
    # The drafts of every second pair of requests come from its own output, so that many of them are accepted.
    predicted = [
        replace(submissions[i], prediction=tuple(output.tokens)) if i // 2 % 2 else submissions[i]
        for i, output in enumerate(expected)
    ]
    outputs = _run(engine, predicted, [plan.streams], "drafted", until)
    _print_progress(mode, "requests with drafts ended", seconds=time.time() - began, requests=len(outputs))
    engine.scheduler.drafter = None
    tokens, mismatches = compare_outputs(*cut_unfinished(expected, outputs))
    engine.close()
    drafted, accepted = drafter.drafted_tokens, drafter.accepted_tokens
    return ModeResult(tokens, mismatches, len(outputs), drafted, accepted, steps, kernels)


def _print_progress(mode: str, event: str, **facts: float) -> None:
    values = " ".join(f"{name}={value:.6g}" for name, value in facts.items())
    print(f"{event}: mode={mode} {values}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class RequestOutput:
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False  # False: the time was up before


def cut_unfinished(
    expected: Sequence[RequestOutput], outputs: Sequence[RequestOutput]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of each request in both runs. If one of the two is unfinished, cut both to the shorter."""
    cut: tuple[list[list[int]], list[list[int]]] = ([], [])
    for pair in zip(expected, outputs, strict=False):
        shared = None if all(output.is_finished for output in pair) else min(len(output.tokens) for output in pair)
        for tokens, output in zip(cut, pair, strict=True):
            tokens.append(output.tokens[:shared])
    return cut


def compare_outputs(expected: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Compare each request up to its first mismatch. Return the number of compared tokens, and of mismatches."""
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
        from emberline.bench.gpu.job_run import VOCAB

        chosen = {"max_context": 8192, "max_running": 256, "max_batch_tokens": 8192, **settings}
        booted = gpu_engine.boot_engine(chosen)
        return booted.engine, _make_random_prompts(plan.prompts, VOCAB), "cuda"
    from emberline.bench import speculation, speculation_prompts
    from emberline.engine.llm import LLM

    llm = LLM(model, **settings)
    questions = speculation_prompts.QUESTIONS
    edits = speculation_prompts.make_edits(-(-plan.prompts // 2))
    mixed = [text for pair in zip(edits, cycle(questions), strict=False) for text in pair][: plan.prompts]
    return llm.engine, [speculation.encode_prompt(llm, text) for text in mixed], llm.loaded.kernels


def _make_random_prompts(count: int, vocab: int) -> list[list[int]]:
    """Return prompts of random tokens. A third of each repeats its beginning, so that n-grams propose drafts."""
    rng = random.Random(SEED)
    prompts = []
    for _ in range(count):
        length = round(math.exp(rng.uniform(*map(math.log, PROMPT_LENGTHS))))
        tokens = [rng.randrange(3, vocab) for _ in range(length)]
        prompts.append(tokens + tokens[: len(tokens) // 2])
    return prompts


def _make_submission(index: int, prompt: list[int], plan: ExactPlan) -> Submission:
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=float(index % 2), seed=SEED + index)
    return Submission(str(index), prompt, params)


def _make_forced_drafter(engine: Engine, plan: ExactPlan) -> Drafter:
    """Return a drafter with which every draft is verified, even if verification takes longer than it saves."""
    from emberline.engine.speculation.drafter import Drafter
    from emberline.engine.speculation.ngram import NgramProposer
    from emberline.engine.speculation.prediction import PredictionProposer
    from emberline.engine.speculation.suffix import SuffixProposer
    from emberline.kernels.cpu.library import find_library

    library = find_library()
    proposer = NgramProposer() if library is None else SuffixProposer(library)
    max_rows = engine.config.max_running
    return Drafter([PredictionProposer(), proposer], plan.max_draft, max_rows=max_rows, adaptive=False)


def _run(
    engine: Engine, submissions: Sequence[Submission], streams: Sequence[int], name: str, until: float
) -> list[RequestOutput]:
    """Run submissions until all are complete or the time is up. Return the outputs of those that were started.

    `streams`: how many requests run at the same time; the numbers are used in turn. `until`: a time, as time.time()."""
    outputs: list[RequestOutput] = []
    phases = cycle(count for count in streams for _ in range(count))
    limits = list(islice(phases, len(submissions)))  # for each submission, how many requests may run at the same time
    is_open = 0
    while (len(outputs) < len(submissions) or is_open) and time.time() < until:
        while len(outputs) < len(submissions) and is_open < limits[len(outputs)]:
            engine.add(replace(submissions[len(outputs)], id=f"{name}-{len(outputs)}", timeout=math.inf))
            outputs.append(RequestOutput())
            is_open += 1
        for output in engine.step():
            assert output.error is None, output.error
            found = outputs[int(output.id.rpartition("-")[2])]
            found.tokens += output.tokens
            found.is_finished = output.finish is not None
            is_open -= found.is_finished
    for i, ended in enumerate(outputs):
        if not ended.is_finished:
            engine.abort(f"{name}-{i}")
    while not engine.idle:
        engine.step()
    return outputs


def _measure_step(engine: Engine, batch: int) -> float:
    """Return the milliseconds of a decode step with this many requests."""
    rng = random.Random(SEED)
    params = SamplingParams(max_tokens=WARM_UP_STEPS + TIMED_STEPS + 8, temperature=0.0, ignore_eos=True)
    ids = [f"step-{batch}-{i}-{time.monotonic_ns()}" for i in range(batch)]
    length = min(STEP_PROMPT_TOKENS, engine.max_context // 2)
    vocab = min(1000, engine.runner.vocab_size)
    for name in ids:
        engine.add(Submission(name, [rng.randrange(3, vocab) for _ in range(length)], params))
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
