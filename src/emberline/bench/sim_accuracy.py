"""`emberline bench sim-accuracy`: compares the simulator with real clusters under the same load.

A cluster has three workers on this machine, once all alike and once split into two prefill workers and a decode worker.
Their steps are paced by a cost table (`--step-costs`), several times slower than this machine computes them, so that
workers and clients can share few cores without waiting for each other. Requests arrive at random times, at several
shares of the cluster's capacity, and the simulator gets the same requests.

The simulator also needs the time that the host adds. Before the load, the time for each step and each request is
measured with one request at a time, and with several decoding requests. The time for each prompt is fitted: with it,
the simulation of a separate load has the measured mean latencies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from emberline.bench import accuracy_h200, workload
from emberline.bench.accuracy_load import LoadResult, LoadShape, TimedRequest, measure_load
from emberline.bench.accuracy_sim import HostOverheads, SimulatedCluster
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.cluster import LocalCluster
from emberline.bench.processes import total_foreign_seconds
from emberline.bench.report import BenchReport
from emberline.bench.step_costs import StepCostPlan, measure_step_costs
from emberline.bench.tiny_checkpoint import VOCAB, write_tiny_checkpoint
from emberline.bench.workload import LogNormal
from emberline.core.config import Role
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.jsonfile import read_object
from emberline.core.step_costs import StepCostData, StepCostTable, count_prompt_pairs
from emberline.hub.source import resolve_model
from emberline.sim.costs import find_cost_data

SERVED_NAME = "bench"
ARRANGEMENTS: dict[str, dict[Role, int]] = {"colocated": {"both": 3}, "split": {"prefill": 2, "decode": 1}}
MAX_RUNNING, BATCH_TOKENS, KV_TOKENS = 64, 512, 65_536
WORKER_OPTIONS = ("--served-name", SERVED_NAME, "--threads", "1", "--device", "cpu", "--embedder", "none")
ALONE_REQUESTS = 4  # requests that run one after the other, to measure the host's overheads; the first is a warm-up
# Requests that decode at the same time at each worker, to measure the host's overhead for each of them.
ROWS, ROW_PROMPT, ROW_OUTPUT = 8, 16, 32
SHAPES = {
    "tiny": LoadShape(LogNormal(5.3, 0.8, 512), LogNormal(3.2, 0.5, 64), VOCAB),
    "smollm2": LoadShape(LogNormal(3.5, 0.6, 96), LogNormal(2.5, 0.5, 32), 49_000),
}
CASES = tuple(SHAPES)
SPLIT_TOKENS = {"tiny": 128, "smollm2": 24}
# Steps take this many times as long as an H200's (tiny) or this machine's (smollm2). Processes that share two cores
# deliver tokens up to 3 ms early or late, which shorter steps would not hide.
PACES = {"tiny": 32.0, "smollm2": 8.0}
LATENCIES = ("ttft_p50", "ttft_p90", "itl_p50", "itl_p90")
FIT_LOAD, FIT_SEED = 85, 1000  # percent of the capacity: queues make small errors of a step's time visible
FIT_RUNS = 2
OTHER_TOKENS_SEED = 2000  # first seed of the prompts when a load is repeated, so that no prefix cache has them
MAX_FOREIGN_CORES, MAX_ATTEMPTS = 0.05, 3  # a measurement in which other processes used more cores is repeated
RUN_TIMEOUT_S = 1200.0  # of one cluster


@dataclass(frozen=True, slots=True)
class AccuracyCase:
    name: str
    model: Path
    costs: StepCostData
    shape: LoadShape
    split_tokens: int  # shortest prompt that a prefill worker computes
    seconds: float  # of arrivals, for each load

    def make_simulated_cluster(self, arrangement: str) -> SimulatedCluster:
        counts = ARRANGEMENTS[arrangement]
        return SimulatedCluster(
            StepCostTable.from_data(self.costs),
            workers=counts.get("both", 0) + counts.get("decode", 0),
            prefill_workers=counts.get("prefill", 0),
            split_tokens=self.split_tokens,
            max_running=MAX_RUNNING,
            batch_tokens=BATCH_TOKENS,
            kv_tokens=KV_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class AccuracyPoint:
    """The measured and the simulated latencies of one cluster under one load."""

    name: str
    rate: float  # requests per second
    requests: int
    real: LoadResult
    simulated: LoadResult
    foreign_cores: float = 0.0  # cores that other processes and the host's other virtual machines used, on average

    def errors(self) -> dict[str, float]:
        """Return the simulator's errors, as fractions of the measured values."""
        return {
            name: abs(getattr(self.simulated, name) / getattr(self.real, name) - 1)
            for name in (*LATENCIES, "output_rate")
            if not math.isnan(getattr(self.real, name))
        }


def bench(cases: Sequence[str], loads: Sequence[int], seconds: float, results_dir: Path, log_dir: Path) -> BenchReport:
    """Measure all cases. `loads`: loads in percent of the capacity. `seconds`: for how long requests of a load arrive.

    `results_dir`: the directory with result files of H200s, with which the simulator is compared too."""
    if unknown := [name for name in cases if name not in CASES]:
        raise InvalidRequest(
            f"cases has the unknown case {unknown[0]!r}", param="cases", hint=f"choose from {', '.join(CASES)}"
        )
    if not loads or not all(1 <= load <= 100 for load in loads):
        message = f"loads is {list(loads)}; it must be one or more numbers from 1 to 100"
        raise InvalidRequest(message, param="loads", hint="use 40,70,90")
    report = BenchReport(
        "sim-accuracy",
        {"cases": list(cases), "loads": list(loads), "seconds": seconds, "load_average": os.getloadavg(), "points": {}},
    )
    points = []
    for name in cases:
        case = make_case(name, seconds, log_dir / name)
        report.config[name] = {"costs": asdict(case.costs), "prompt": case.shape.prompt, "output": case.shape.output}
        points += asyncio.run(_measure_case(case, loads, log_dir / name, report))
    _add_all_points(report, points, results_dir)
    return report


def compare_recorded(recording: Path, results_dir: Path) -> BenchReport:
    """Repeat only the simulations of an earlier report, and compare them with the measurements in the report."""
    document = read_object(recording)
    if document.get("bench") != "sim-accuracy":
        hint = "give a file that this command wrote with --json"
        raise InvalidRequest(f"{recording} has no measurements of this bench", param="real", hint=hint)
    old = document["config"]
    config = {name: value for name, value in old.items() if name != "points"}
    facts = {"file": recording.name, "commit": document["commit"], "command": document["command"]}
    report = BenchReport("sim-accuracy", {**config, "measured": facts, "points": {}})
    points = []
    for name in old["cases"]:
        case, colocated = recorded_case(name, old), HostOverheads()
        alone = draw_alone_requests(case.shape)
        for arrangement in ARRANGEMENTS:
            facts, simulated = old[f"{name}_{arrangement}"], case.make_simulated_cluster(arrangement)
            overheads = replace(HostOverheads(**facts["overheads"]), prefill_chunk_s=colocated.chunk_s)
            requests = case.shape.draw_poisson(facts["fit_load"] / 100 * facts["capacity"], case.seconds, FIT_SEED)
            means = fmean(facts["fitted_itl_means"]), fmean(facts["fitted_ttft_means"])
            overheads = simulated.fit(requests, overheads, alone, *means)
            colocated = overheads if arrangement == "colocated" else colocated
            report.config[f"{name}_{arrangement}"] = facts | {"overheads": asdict(overheads)}
            for load in old["loads"]:
                point, rate = f"{name}_{arrangement}_{load}", load / 100 * facts["capacity"]
                measured = old["points"][point]
                requests = case.shape.draw_poisson(rate, case.seconds, seed=load)
                result = simulated.simulate(requests, overheads, alone)
                real = LoadResult(**measured["real"])
                points.append(AccuracyPoint(point, rate, len(requests), real, result, measured["foreign_cores"]))
    _add_all_points(report, points, results_dir)
    return report


def _compare_with_h200(results_dir: Path) -> Iterator[AccuracyPoint]:
    for file in accuracy_h200.FILES:
        real, simulated, requests = accuracy_h200.compare_with_file(results_dir / file)
        yield AccuracyPoint(file.removesuffix(".json"), accuracy_h200.RATE, requests, real, simulated)


def make_case(name: str, seconds: float, directory: Path) -> AccuracyCase:
    """Prepare a case: its model, and its step costs, which are several times as high as measured ones."""
    smollm2 = resolve_model("smollm2")
    if name == "tiny":
        costs = replace(find_cost_data("h200", "llama-8b", "plain").scale(PACES[name]), plans_ahead=False)
        model = write_tiny_checkpoint(directory / "model", smollm2)
        return AccuracyCase(name, model, costs, SHAPES[name], SPLIT_TOKENS[name], seconds)
    plan = StepCostPlan(rows=(1, 4, 16), contexts=(32, 256), chunks=(16, 64, 192), threads=1, rounds=2)
    costs = measure_step_costs("smollm2", plan).scale(PACES[name])
    return AccuracyCase(name, smollm2, costs, SHAPES[name], SPLIT_TOKENS[name], seconds)


def recorded_case(name: str, config: Mapping[str, Any]) -> AccuracyCase:
    """Return a case with the step costs in the config of an earlier report. The case has no model files."""
    costs = StepCostData.from_json(config[name]["costs"])
    return AccuracyCase(name, Path(name), costs, SHAPES[name], SPLIT_TOKENS[name], config["seconds"])


def draw_alone_requests(shape: LoadShape) -> list[TimedRequest]:
    """Return the requests that run one at a time before the load. Their prompts have the maximum length."""
    requests = shape.draw_requests([0.0] * ALONE_REQUESTS, seed=0)
    return [replace(each, prompt=(each.prompt * 8)[: shape.prompt.maximum]) for each in requests]


async def _measure_case(
    case: AccuracyCase, loads: Sequence[int], directory: Path, report: BenchReport
) -> list[AccuracyPoint]:
    costs_file = directory / "step-costs.json"
    directory.mkdir(parents=True, exist_ok=True)
    costs_file.write_text(json.dumps(asdict(case.costs)), "utf-8")
    worker = [
        str(case.model),
        *WORKER_OPTIONS,
        "--step-costs",
        str(costs_file),
        "--max-batch-tokens",
        str(BATCH_TOKENS),
    ]
    router = ["--split-tokens", str(case.split_tokens)]
    points, overheads = [], HostOverheads()
    for arrangement, counts in ARRANGEMENTS.items():
        logs = directory / arrangement
        async with (
            asyncio.timeout(RUN_TIMEOUT_S),
            LocalCluster(counts, worker, logs, router_arguments=router) as cluster,
        ):
            client = CompletionClient(f"{cluster.url}/v1", SERVED_NAME)
            overheads, alone = await _measure_overheads(client, case, overheads, arrangement)
            simulated = case.make_simulated_cluster(arrangement)
            capacity = simulated.capacity(case.shape, overheads)
            requests = case.shape.draw_poisson(FIT_LOAD / 100 * capacity, case.seconds, FIT_SEED)
            seeds, fits = itertools.count(OTHER_TOKENS_SEED), []
            for _ in range(FIT_RUNS):
                others = case.shape.draw_other_tokens(requests, next(seeds))
                fits.append((await _measure_undisturbed(client, case.shape, others, seeds))[0])
            means, first_means = [fit.itl_mean for fit in fits], [fit.ttft_mean for fit in fits]
            overheads = simulated.fit(requests, overheads, alone, fmean(means), fmean(first_means))
            report.config[f"{case.name}_{arrangement}"] = {
                "capacity": capacity,
                "overheads": asdict(overheads),
                "fit_load": FIT_LOAD,
                "fitted_itl_means": means,
                "fitted_ttft_means": first_means,
            }
            for load in loads:
                requests = case.shape.draw_poisson(load / 100 * capacity, case.seconds, seed=load)
                if held := await cluster.wait_until_idle():
                    raise EmberlineError(f"workers still hold resources while no request is open: {held}")
                real, foreign_cores = await _measure_undisturbed(client, case.shape, requests, seeds)
                name, rate = f"{case.name}_{arrangement}_{load}", load / 100 * capacity
                result = simulated.simulate(requests, overheads, alone)
                points.append(AccuracyPoint(name, rate, len(requests), real, result, foreign_cores))
                print(f"{name}: {len(requests)} requests", flush=True)
            handoffs = (await cluster.fetch_router_status() or {}).get("prefills", {})
            report.config[f"{case.name}_{arrangement}"]["handoffs"] = handoffs
            client.close()
    return points


async def _measure_undisturbed(
    client: CompletionClient, shape: LoadShape, requests: Sequence[TimedRequest], seeds: Iterator[int]
) -> tuple[LoadResult, float]:
    """Measure a load, again if other processes used the cores. Return the least disturbed result and the cores used.

    `seeds`: seeds for the prompts of repetitions, so that no earlier measurement has used the same prompts."""
    attempts: list[tuple[float, LoadResult]] = []
    while len(attempts) < MAX_ATTEMPTS and min((used for used, _ in attempts), default=1.0) > MAX_FOREIGN_CORES:
        began, used = time.perf_counter(), total_foreign_seconds()
        if attempts:
            requests = shape.draw_other_tokens(requests, next(seeds))
        real = await measure_load(client, requests)
        attempts.append(((total_foreign_seconds() - used) / (time.perf_counter() - began), real))
    foreign_cores, real = min(attempts, key=lambda attempt: attempt[0])
    return real, max(0.0, foreign_cores)  # a process that ended unobserved takes its time with it


async def _measure_overheads(
    client: CompletionClient, case: AccuracyCase, colocated: HostOverheads, arrangement: str
) -> tuple[HostOverheads, list[TimedRequest]]:
    """Return the overheads of the host, and the requests with which they were measured.

    `colocated`: the overheads of the colocated cluster, which is measured before the split one."""
    table = StepCostTable.from_data(case.costs)
    requests = draw_alone_requests(case.shape)
    steps, firsts = [], []
    for request in requests:
        trace = await client.complete(request.prompt, request.output)
        if trace.error is not None:
            raise EmberlineError(f"a request without other load failed: {trace.error}", hint="see the workers' logs")
        steps.append(_step_overhead(trace, request, table))
        count = len(request.prompt)
        firsts.append(trace.event_times[0] - trace.sent - table.step_seconds(0, 0, count, count_prompt_pairs(0, count)))
    step_s, first_s = median(steps[1:]), median(firsts[1:])
    if arrangement == "colocated":
        row_s = await _measure_row_overhead(client, case, table, step_s)
        return HostOverheads(step_s, row_s, request_s=max(0.0, first_s - step_s)), requests
    handoff_s = max(0.0, first_s - step_s - colocated.request_s)
    return replace(colocated, handoff_s=handoff_s, prefill_chunk_s=colocated.chunk_s), requests


async def _measure_row_overhead(
    client: CompletionClient, case: AccuracyCase, table: StepCostTable, step_s: float
) -> float:
    """Return the seconds that the host adds to a step per decoding request, measured with ROWS requests per worker."""
    lengths = [(ROW_PROMPT, ROW_OUTPUT)] * ROWS * sum(ARRANGEMENTS["colocated"].values())
    job = workload.make_job(lengths, case.shape.vocab_size, seed=1)
    traces = await asyncio.gather(*map(client.complete, job.prompts, job.outputs))
    gaps = [gap for trace in traces for gap in trace.inter_token_seconds[ROW_OUTPUT // 2 :]]  # all of them decode
    if not gaps:
        raise EmberlineError(f"requests without other load failed: {traces[0].error}", hint="see the workers' logs")
    context = ROWS * (ROW_PROMPT + ROW_OUTPUT * 3 / 4)
    return max(0.0, (median(gaps) - table.step_seconds(ROWS, context) - step_s) / (ROWS - 1))


def _step_overhead(trace: RequestTrace, request: TimedRequest, table: StepCostTable) -> float:
    gaps = trace.inter_token_seconds
    context = len(request.prompt) + request.output / 2
    return median(gaps) - table.step_seconds(1, context) if gaps else 0.0


# -- results -----------------------------------------------------------------------------------------------------------


def add_points(report: BenchReport, points: Sequence[AccuracyPoint], prefix: str = "") -> None:
    """Add each point and the largest errors to the report. `prefix`: the beginning of the largest errors' names."""
    for point in points:
        report.config["points"][point.name] = {
            "rate": point.rate,
            "requests": point.requests,
            "foreign_cores": point.foreign_cores,
            "real": _without_nan(asdict(point.real)),
            "simulated": _without_nan(asdict(point.simulated)),
            "errors": point.errors(),
        }
        for name in LATENCIES:
            report.add(f"{point.name}_{name}", 1e3 * getattr(point.simulated, name), "ms")
            report.add(f"{point.name}_{name}/real", 1e3 * getattr(point.real, name), "ms")
    add_largest_errors(report, points, prefix)


def add_largest_errors(report: BenchReport, points: Sequence[AccuracyPoint], prefix: str = "") -> None:
    worst: dict[str, float] = {}
    for point in points:
        worst |= {name: max(error, worst.get(name, 0.0)) for name, error in point.errors().items()}
    for name, error in worst.items():
        report.add(f"{prefix}{'throughput' if name == 'output_rate' else name}_error_max", error, "of the measured")


def _add_all_points(report: BenchReport, points: Sequence[AccuracyPoint], results_dir: Path) -> None:
    """Add the points of all cases, the largest errors of each case, and those of runs on an H200."""
    add_points(report, points)
    for case in report.config["cases"]:
        add_largest_errors(report, [point for point in points if point.name.startswith(case)], f"{case}_")
    add_points(report, list(_compare_with_h200(results_dir)), prefix="h200_")


def _without_nan(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not math.isnan(value)}
