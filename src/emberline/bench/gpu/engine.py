"""Measures the engine in this process: decode steps, single prompts, and many concurrent conversations."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any

from emberline.bench import workload
from emberline.bench.gpu.job_run import (
    CONFIG,
    JOB_TIMEOUT_S,
    JobRun,
    MeasuredEngine,
    RunJob,
    SteadyPhase,
    run_job,
)
from emberline.bench.gpu.largest_step import run_largest_steps
from emberline.bench.gpu.limits import H200, choose_limits, compute_token_cost, min_decode_step_ms, min_prefill_ms
from emberline.bench.gpu.model import LLAMA_8B, RandomWeights
from emberline.bench.gpu.shapes import DEFAULT_SHAPE, BenchShape, find_routing, find_shape, shape_of
from emberline.bench.job import BenchJob
from emberline.bench.machine_limits import MachineLimits, TokenCost
from emberline.bench.report import BenchReport
from emberline.core.engine_config import ONLINE_FORMATS, EngineConfig
from emberline.core.params import SamplingParams
from emberline.engine.memory import GRAPH_BYTES
from emberline.models.config import ModelConfig

if TYPE_CHECKING:
    from emberline.engine.gpu.boot import BootedGPUEngine


BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256  # of a decode measurement
COUNTED_PROMPT_TOKENS = 32  # of requests whose distinct experts are counted
PREFILL_TOKENS = (2048, 8192, 30_000)
CHAT_REQUESTS = 1000
NAMES = (*(f"decode_b{b}" for b in BATCHES), *(f"prefill_{p}" for p in PREFILL_TOKENS), f"chat{CHAT_REQUESTS}")
CPU_BATCHES = (64, 256)  # batches whose host CPU time is reported; the first makes about 10,000 tok/s

ROUNDS = 2  # of a decode measurement
PREFILL_ROUNDS = 3
MAX_WAITING = 4096  # requests of a measurement that may wait at the same time
SETTINGS: dict[str, Any] = {
    "max_running": 1024,
    "max_batch_tokens": 32_768,  # a whole prompt is one step
    "max_context": 32_768,
    "prefix_cache": False,
}
WARM_UP = "each batch size, each prompt length and, before the chat, every eighth batch size ran once untimed"


def make_warm_up_lengths(requests: int) -> list[tuple[int, int]]:
    """Return (prompt, output) lengths for a warm-up in which the batch shrinks as requests end.

    The batch shrinks by 8 requests at a time down to 16 requests, then by one at a time. So the engine runs every one
    of these batch sizes once before the measurement.
    """
    wide = max(0, requests - 16)
    steps = [(16, 2 + i // 8) for i in range(wide)]
    return steps + [(16, 3 + wide // 8 + i) for i in range(requests - wide)]


@dataclass(frozen=True, slots=True)
class EngineBench:
    """Measures one engine and adds the results to a report.

    `peer` is the name of another engine (a peer), or "" for Emberline's engine.
    """

    report: BenchReport
    run_job: RunJob
    cost: TokenCost
    rounds: int = ROUNDS
    peer: str = ""
    shape: BenchShape = field(default_factory=lambda: find_shape(DEFAULT_SHAPE))
    count_experts: Callable[[int], float] | None = None  # returns the distinct experts of a layer, for a batch
    limits: MachineLimits = H200
    prefix: str = ""  # first part of the names of results: it replaces "decode", or stands before other names

    def measure_by_name(self, name: str) -> None:
        kind, _, size = name.rpartition("_")
        if kind == "decode":
            self.measure_decode(int(size[1:]))
        elif kind == "prefill":
            self.measure_prefill(int(size))
        else:
            self.measure_chat(int(name.removeprefix("chat")))

    def measure_decode(self, batch: int) -> None:
        self.run_job(self._make_job([(32, 4)] * batch), JOB_TIMEOUT_S)
        job = self._make_job([(PROMPT_TOKENS, OUTPUT_TOKENS)] * batch)
        courses = [self.run_job(job, JOB_TIMEOUT_S) for _ in range(self.rounds)]
        parts = [SteadyPhase.from_timeline(job, course.timeline) for course in courses]
        limit = min_decode_step_ms(batch, parts[0].context, self._cost_of_batch(batch), self.limits)
        self._add_result(f"decode_b{batch}_ms", [1e3 * part.step_seconds for part in parts], "ms", limit)
        if batch in CPU_BATCHES and not self.peer:
            self._add_result(
                f"decode_b{batch}_tok_s", [batch / part.step_seconds for part in parts], "tok/s", 1e3 * batch / limit
            )
            shares = [c.cpu_percent(p.begin, p.end) for c, p in zip(courses, parts, strict=True)]
            self._add_result(f"decode_b{batch}_cpu", shares, "% of a core")

    def measure_prefill(self, tokens: int) -> None:
        jobs = [self._make_job([(tokens, 1)], seed) for seed in range(PREFILL_ROUNDS + 1)]
        walls = [self.run_job(job, JOB_TIMEOUT_S).timeline.wall_seconds for job in jobs]
        # For latent attention, `cost` counts the operations of the decode form, which needs more of them for prompts.
        has_latents = ModelConfig.from_hf(self.shape.hf_config).parts.attention.latent is not None
        limit = None if has_latents else min_prefill_ms(tokens, self._cost_of_prefill(), self.limits)
        self._add_result(f"prefill_{tokens}_ms", [1e3 * wall for wall in walls[1:]], "ms", limit)

    def measure_chat(self, requests: int) -> None:
        self.run_job(self._make_job(make_warm_up_lengths(requests)), JOB_TIMEOUT_S)
        self.run_job(self._make_job(workload.draw_chat_lengths(min(128, requests), seed=1)), JOB_TIMEOUT_S)
        job = self._make_job(workload.draw_chat_lengths(requests))
        course = self.run_job(job, JOB_TIMEOUT_S)
        rate = course.timeline.output_rate()
        self._add_result(f"chat{requests}_out_tok_s", rate, "tok/s", self.cost.max_output_rate(self.limits, job))
        if not self.peer:
            self._add_result(
                f"chat{requests}_cpu", course.cpu_percent(0.0, course.timeline.wall_seconds), "% of a core"
            )

    def _make_job(self, lengths: list[tuple[int, int]], seed: int = 0) -> BenchJob:
        return workload.make_job(lengths, self.shape.prompt_vocab, seed)

    def _cost_of_batch(self, batch: int) -> TokenCost:
        if self.count_experts is None:
            return self.cost
        distinct = self.count_experts(batch)
        self._add_result(f"decode_b{batch}_experts", distinct, "experts per layer")
        return self.cost.with_experts(ModelConfig.from_hf(self.shape.hf_config), distinct)

    def _cost_of_prefill(self) -> TokenCost:
        """Return the cost of a prefill step, which has so many rows that they use all experts."""
        config = ModelConfig.from_hf(self.shape.hf_config)
        return self.cost.with_experts(config, 0 if config.experts is None else config.experts.count)

    def _add_result(self, name: str, values: float | list[float], unit: str, limit: float | None = None) -> None:
        if self.peer:
            self.report.add(f"{name}/{self.peer}", values, unit)
        else:
            named = f"{self.prefix}_{name.removeprefix('decode_')}" if self.prefix else name
            self.report.add(named, values, unit, peer=self.shape.vllm_figures.get(name), limit=limit)


def measure(
    report: BenchReport, name_patterns: Sequence[str] = (), settings: dict[str, Any] | None = None, rounds: int = 0
) -> None:
    from emberline.bench.gpu import sampled_decode

    chosen = SETTINGS | (settings or {})
    began = time.perf_counter()
    booted = boot_engine(chosen)
    report.config |= {
        "settings": chosen,
        "warm_up": WARM_UP,
        "rounds": rounds or ROUNDS,
        "memory": asdict(booted.plan),
        "boot_s": {"all": time.perf_counter() - began, **booted.seconds},
    }
    shape, run, cost = shape_of(chosen), partial(run_job, booted.engine), compute_token_cost(chosen)
    counter = _make_counter(booted, shape)
    bench = EngineBench(
        report, run, cost, rounds or ROUNDS, shape=shape, count_experts=counter,
        limits=choose_limits(chosen), prefix=str(chosen.get("prefix", "")),
    )  # fmt: skip
    for name in NAMES:
        if is_measurement_selected(name, name_patterns):
            run_measurement(report, name, partial(bench.measure_by_name, name))
    for name in sampled_decode.NAMES:
        if shape.hf_config is LLAMA_8B and is_measurement_selected(name, name_patterns):
            sample = partial(_run_sampled_job, booted.engine)
            run_measurement(report, name, partial(sampled_decode.measure, report, sample, name, rounds or ROUNDS))
    _add_memory(report, booted, shape.prompt_vocab)
    report.config["stats"] = {k: v for k, v in asdict(booted.engine.stats()).items() if k != "residency"}


def _add_memory(report: BenchReport, booted: BootedGPUEngine, vocab: int) -> None:
    """Add the memory that the plan expected to be used, and the memory that is used after the largest steps.

    `memory_expected` is the plan without the graphs of shapes that were not captured. `memory_tensors` is the peak of
    what torch has allocated since all weights were loaded, `memory_cached` what torch holds beyond that peak, and
    `memory_other` the rest: graphs, kernels and libraries."""
    import torch

    before, _ = torch.cuda.mem_get_info()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run_largest_steps(booted, vocab)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    planned, used = booted.plan.total - booted.plan.spare_bytes, total - free
    missing = booted.runner.num_unprepared
    expected = planned - missing * GRAPH_BYTES
    report.add("memory_planned", planned / 2**30, "GiB")
    report.add("memory_expected", expected / 2**30, "GiB")
    report.add("memory_used", used / 2**30, "GiB")
    report.add("plan_error", 100 * abs(used - expected) / expected, "%")
    report.add("memory_before_largest_step", (total - before) / 2**30, "GiB")
    report.add("memory_tensors", peak / 2**30, "GiB")
    report.add("memory_cached", (reserved - peak) / 2**30, "GiB")
    report.add("memory_other", (used - reserved) / 2**30, "GiB")
    report.add("graphs_not_captured", missing, f"of {len(booted.runner.shapes)} shapes")


def _make_counter(booted: BootedGPUEngine, shape: BenchShape) -> Callable[[int], float] | None:
    """Return a function that counts the distinct experts of decode steps; None for a model without experts."""
    from emberline.bench.gpu.distinct_experts import count_distinct_experts

    if booted.runner.model.config.experts is None:
        return None

    def count(batch: int) -> float:
        job = workload.make_job([(COUNTED_PROMPT_TOKENS, 8)] * batch, shape.prompt_vocab)
        return count_distinct_experts(booted.runner, lambda: run_job(booted.engine, job), batch)

    return count


def _run_sampled_job(engine: MeasuredEngine, job: BenchJob, params: SamplingParams) -> JobRun:
    return run_job(engine, job, params=params)


def boot_engine(settings: dict[str, Any]) -> BootedGPUEngine:
    import torch

    from emberline.bench.gpu.distinct_experts import tie_router_scores
    from emberline.bench.gpu.sampled_decode import make_grammar_compiler
    from emberline.engine.gpu.boot import boot_gpu

    form = str(settings.get("weights", ""))
    online = form if form in ONLINE_FORMATS else ""
    weights = RandomWeights("cuda", torch.bfloat16, packed=form == "packed", online=online)
    has_tied_scores = find_routing(settings) == "tied"
    others = {name: value for name, value in settings.items() if name not in ("shape", "routing", "prefix")}
    config = EngineConfig.build("", **{"max_waiting": MAX_WAITING, **others}).with_gpu_defaults()
    model = ModelConfig.from_hf(shape_of(settings).hf_config)
    compiler = make_grammar_compiler if model == CONFIG else None
    booted = boot_gpu(model, weights, context=settings["max_context"], settings=config, make_compiler=compiler)
    if has_tied_scores:
        tie_router_scores(booted.runner.model)
    return booted


def is_measurement_selected(name: str, name_patterns: Sequence[str]) -> bool:
    """Return whether the patterns select a measurement. No patterns select all measurements.

    A pattern matches the name of a measurement, also with wildcards, or the name of one of its results.
    """
    return not name_patterns or any(
        fnmatch(name, pattern) or pattern.startswith(f"{name}_") for pattern in name_patterns
    )


def run_measurement(report: BenchReport, name: str, measurement: Callable[[], None]) -> None:
    """Run a measurement. If it fails, record the error in the report, so that the other measurements still run."""
    began = time.perf_counter()
    try:
        measurement()
    except Exception as error:
        traceback.print_exc()
        report.config.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
    print(f"measurement finished: name={name} seconds={time.perf_counter() - began:.1f}", file=sys.stderr, flush=True)
