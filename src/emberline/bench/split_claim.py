"""`emberline bench split-claim`: the published gain of splitting prefill from decode, on a virtual clock.

Cloudflare reports that the p90 of inter-token times fell from about 100 ms to 20-30 ms with the same number of GPUs.
Here simulated H200s serve a model of Llama 3.1 8B's shape: prompts of 4,096 tokens and replies of 256. In a colocated
arrangement, all workers compute prompts and generate replies. Between the steps of its streams, a worker computes a
whole prompt or, with --itl-target-ms, a chunk of one. In a split arrangement, prefill workers compute the prompts. All
arrangements get the same requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from emberline.bench.report import BenchReport
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.core.step_costs import StepCostTable, count_prompt_pairs
from emberline.sim.cluster import SimCluster, SimClusterConfig, SimDetail
from emberline.sim.costs import find_cost_table
from emberline.sim.link import KVLink
from emberline.sim.result import Distribution, RequestRecord
from emberline.sim.workloads.arrivals import ConstantRate
from emberline.sim.workloads.requests import RequestWorkload

GPU, SHAPE, WEIGHTS = "h200", "llama-8b", "plain"
PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 256
BATCH_TOKENS, MAX_RUNNING, BLOCK_SIZE = 8192, 256, 64  # the engine's defaults on a GPU
# Requests per second of a colocated GPU, as in h200-open.json: at a nominal rate of 8, 143 requests arrived in 20 s. At
# this nominal rate, vLLM 0.24 had inter-token times with a p90 of 108.8 ms on one H200 (h200-open.json).
RATE_PER_GPU = 143 / 20
ITL_TARGET_S, ITL_TARGET_MS = 0.030, 29.3
TTFT_TARGET_S = 0.610  # our choice; vLLM 0.24 had a p90 of 0.485 s at the nominal rate (h200-open.json)
# KV blocks are copied between GPUs of one machine: handoff_cuda and handoff_cuda_overhead_ms in h200-handoff.json.
LINK = KVLink(bytes_per_second=203.03e9, latency_s=4.5506e-3)


@dataclass(frozen=True, slots=True)
class GPUArrangement:
    answering: int  # GPUs that generate tokens, and also compute prompts if `prefill` is 0
    prefill: int = 0
    itl_target_ms: float | None = None  # chunks of prompts are sized for it; None: whole prompts

    @property
    def gpus(self) -> int:
        return self.answering + self.prefill

    @property
    def name(self) -> str:
        if self.prefill:
            return f"split_{self.prefill}+{self.answering}"
        return f"colocated_{self.answering}" + ("_paced" if self.itl_target_ms else "")


@dataclass(frozen=True, slots=True)
class ArrangementLatency:
    itl_p50: float
    itl_p90: float
    itl_p99: float
    ttft_p50: float
    ttft_p90: float

    @property
    def meets_targets(self) -> bool:
        return self.itl_p90 <= ITL_TARGET_S and self.ttft_p90 <= TTFT_TARGET_S


def bench(rate: float, seconds: float, detail: SimDetail = "steps") -> BenchReport:
    """Compare colocated and split workers at `rate` requests per second, for `seconds` of virtual time.

    `detail`: "steps" simulates every step of an engine. "runs" uses FastWorkers, which takes seconds instead of
    minutes, but leaves out the arrangement with --itl-target-ms."""
    if not rate >= RATE_PER_GPU:
        message = f"rate is {rate:g}; it must be at least {RATE_PER_GPU:g}, the requests per second of one GPU"
        raise InvalidRequest(message, param="rate", hint="use a multiple of the rate of one GPU, such as 57.2")
    if not seconds > 0:
        raise InvalidRequest(f"seconds is {seconds:g}; it must be above 0", param="seconds")
    table = find_cost_table(GPU, SHAPE, WEIGHTS)
    config = {
        "gpu": GPU,
        "shape": SHAPE,
        "weights": WEIGHTS,
        "costs": table.source,
        "rate": rate,
        "seconds": seconds,
        "detail": detail,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "batch_tokens": BATCH_TOKENS,
        "link": asdict(LINK),
        "targets": {"itl_p90_s": ITL_TARGET_S, "ttft_p90_s": TTFT_TARGET_S},
    }
    report = BenchReport("split-claim", config)
    found: dict[GPUArrangement, ArrangementLatency] = {}

    def measure(arrangement: GPUArrangement) -> ArrangementLatency:
        if arrangement not in found:
            found[arrangement] = latency = simulate(arrangement, table, rate, seconds, detail)
            _add_latency(report, arrangement, latency)
            print(f"{arrangement.name}: inter-token p90 {1e3 * latency.itl_p90:.1f} ms", flush=True)
        return found[arrangement]

    colocated = GPUArrangement(round(rate / RATE_PER_GPU))
    base = measure(colocated)
    split = _find_smallest_split(colocated.gpus, measure, partial(can_keep_up, table=table, rate=rate))
    # The published claim is about equal numbers of GPUs. A colocated arrangement of this size has GPUs to spare.
    equal = GPUArrangement(split.gpus)
    at_equal = measure(equal)
    if detail == "steps":
        measure(GPUArrangement(split.gpus, itl_target_ms=ITL_TARGET_MS))
    report.add("colocated_itl_p90_ms", 1e3 * base.itl_p90, "ms")
    report.add("split_itl_p90_ms", 1e3 * measure(split).itl_p90, "ms")
    report.add("colocated_gpus", colocated.gpus, "GPUs")
    report.add("split_gpus", split.gpus, "GPUs")
    report.add("equal_gpus_colocated_itl_p90_ms", 1e3 * at_equal.itl_p90, "ms")
    report.config["chosen"] = {"colocated": asdict(colocated), "split": asdict(split), "equal": asdict(equal)}
    return report


def simulate(
    arrangement: GPUArrangement, table: StepCostTable, rate: float, seconds: float, detail: SimDetail = "steps"
) -> ArrangementLatency:
    """Return the latencies in the second half of the arrivals. In the first half, batches may still be growing."""
    workload = RequestWorkload(ConstantRate(rate), seconds, PROMPT_TOKENS, OUTPUT_TOKENS)
    cluster = SimCluster(
        SimClusterConfig(
            kv_tokens=table.kv_tokens,
            max_running=MAX_RUNNING,
            batch_tokens=BATCH_TOKENS,
            itl_target_ms=arrangement.itl_target_ms,
            cost=table,
            block_size=BLOCK_SIZE,
            workers=arrangement.answering,
            prefill_workers=arrangement.prefill,
            link=LINK,
            kv_bytes_per_token=table.kv_bytes_per_token,
            detail=detail,
        )
    )
    begin, gaps, records = seconds / 2, list[Distribution](), list[RequestRecord]()

    def restart_gaps() -> None:
        gaps.append(cluster.result.inter_token_seconds)
        cluster.result.inter_token_seconds = Distribution()

    for time in (begin, seconds):
        cluster.call_at(time, restart_gaps)
    cluster.observers.append(records.append)
    cluster.run(workload.sessions(seed=0))
    if failed := [record for record in records if record.outcome != "answered"]:
        raise EmberlineError(f"{len(failed)} requests at {arrangement.name} were {failed[0].outcome}")
    itl, ttft = gaps[1], Distribution()
    for record in records:
        if record.arrived_at >= begin and record.first_token_at is not None:
            ttft.add(record.first_token_at - record.arrived_at)
    return ArrangementLatency(*(itl.quantile(q) for q in (0.5, 0.9, 0.99)), *(ttft.quantile(q) for q in (0.5, 0.9)))


def _find_smallest_split(
    gpus: int, measure: Callable[[GPUArrangement], ArrangementLatency], can_keep_up: Callable[[GPUArrangement], bool]
) -> GPUArrangement:
    """Return the split arrangement with the fewest GPUs, but at least `gpus`, that meets the targets."""
    for total in range(max(gpus, 2), 2 * gpus + 1):
        for answering in range(1, total):
            split = GPUArrangement(answering, total - answering)
            if can_keep_up(split) and measure(split).meets_targets:
                return split
    raise EmberlineError(f"no split arrangement of up to {2 * gpus} GPUs meets the targets", hint="lower the rate")


def can_keep_up(split: GPUArrangement, table: StepCostTable, rate: float) -> bool:
    """Return whether the GPUs have enough time for the prompts and for the steps of decoding requests.

    This is a rough check that saves simulations of arrangements that cannot meet the targets."""
    prompt_s = table.step_seconds(0, 0, PROMPT_TOKENS, count_prompt_pairs(0, PROMPT_TOKENS))
    context = PROMPT_TOKENS + OUTPUT_TOKENS / 2
    # The number of requests that decode on each GPU if its steps take as long as the target allows.
    rows = int(rate / split.answering * OUTPUT_TOKENS * ITL_TARGET_S)
    return prompt_s * rate < split.prefill and table.step_seconds(rows, rows * context) <= ITL_TARGET_S


def _add_latency(report: BenchReport, arrangement: GPUArrangement, latency: ArrangementLatency) -> None:
    for name, seconds in asdict(latency).items():
        report.add(f"{arrangement.name}_{name}", 1e3 * seconds, "ms")
