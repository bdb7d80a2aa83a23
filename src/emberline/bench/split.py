"""`emberline bench split`: one prefill and one decode worker, compared with two workers that do both.

Each worker runs on its own core. The two arrangements take turns, each time with a new cluster, for each chunk size in
turn. Smaller chunks of prompts disturb running streams less but make prompts slower.

In the first phase of a run, long prompts arrive one at a time. The time to the first token minus the compute time,
compared between the two arrangements, is the overhead of the handoff between workers. In the second phase, long prompts
and short chats arrive at random times, which are the same in every run. Workers report the time of KV transfers and how
much of it overlapped with computation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emberline.bench import workload
from emberline.bench.client import CompletionClient, RequestTrace
from emberline.bench.cluster import LocalCluster
from emberline.bench.report import BenchReport
from emberline.bench.serve import SHARES
from emberline.core.config import Role
from emberline.core.errors import EmberlineError

SERVED_NAME = "bench"
SHAPES: dict[str, dict[Role, int]] = {"split": {"prefill": 1, "decode": 1}, "colocated": {"both": 2}}
WORKER_OPTIONS = ("--served-name", SERVED_NAME, "--threads", "1", "--device", "cpu", "--embedder", "none")
SLACK = 600.0  # seconds after the last arrival within which a run must end
MOVED = ("pulls", "pulled_bytes", "copy_seconds", "hidden_seconds", "recomputed")


@dataclass(frozen=True, slots=True)
class SplitBenchPlan:
    chunks: Sequence[int]  # maximum tokens of a step
    rounds: int
    seconds: float  # during which requests arrive
    long: int  # tokens of a long prompt; its output is short
    long_rate: float  # requests per second
    chat: tuple[int, int]  # tokens of prompt and output
    chat_rate: float
    alone: int  # long prompts that arrive one at a time


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    at: float  # seconds
    prompt: list[int]
    output: int
    long: bool


@dataclass(frozen=True, slots=True)
class UnloadedTimes:
    """Times of a long prompt with one output token and no other load, in seconds."""

    whole: float
    computing: float  # compute time of the worker that had the prompt

    @property
    def non_compute_seconds(self) -> float:
        return self.whole - self.computing


@dataclass(slots=True)
class SplitBenchRun:
    alone: list[UnloadedTimes] = field(default_factory=list)
    moved: dict[str, dict[str, float]] = field(default_factory=dict)  # transfer counters, of both phases
    busy: dict[str, float] = field(default_factory=dict)  # share of the time in which each worker computed
    prefills: Counter[str] = field(default_factory=Counter)  # prefills for another worker, by outcome
    wall: float = 0.0
    traces: dict[bool, list[RequestTrace]] = field(default_factory=lambda: {True: [], False: []})  # long or not

    def ttft_seconds(self, is_long: bool) -> list[float]:
        return [t.timing.ttft for t in self.traces[is_long] if t.error is None and t.timing.ttft is not None]

    def inter_token_seconds(self) -> list[float]:
        """Return the seconds between consecutive events of all streams."""
        return [gap for traces in self.traces.values() for trace in traces for gap in trace.inter_token_seconds]

    @property
    def all_traces(self) -> list[RequestTrace]:
        return [*self.traces[True], *self.traces[False]]


def bench(model: str, vocab_size: int, plan: SplitBenchPlan, log_dir: Path) -> BenchReport:
    report = BenchReport("split", {"model": model, **{name: getattr(plan, name) for name in plan.__slots__}})
    turns: dict[tuple[str, int], list[SplitBenchRun]] = {
        (shape, chunk): [] for chunk in plan.chunks for shape in SHAPES
    }

    async def run_all_rounds() -> None:
        for number in range(plan.rounds):
            for (shape, chunk), done in turns.items():
                home = log_dir / f"{shape}-{chunk}-{number + 1}"
                async with asyncio.timeout(plan.seconds + SLACK):
                    done.append(await _run_round(model, vocab_size, plan, number, shape, chunk, home))
                print(f"{shape}, {chunk} tokens a step, round {number + 1}: {done[-1].wall:.0f} s", flush=True)

    asyncio.run(run_all_rounds())
    for chunk in plan.chunks:
        _add_results(report, chunk, turns["split", chunk], turns["colocated", chunk])
    return report


# -- one run -----------------------------------------------------------------------------------------------------------


async def _run_round(
    model: str, vocab_size: int, plan: SplitBenchPlan, seed: int, arrangement: str, chunk_tokens: int, log_dir: Path
) -> SplitBenchRun:
    rng, turn = np.random.default_rng(seed), SplitBenchRun()
    worker = [model, *WORKER_OPTIONS, "--max-batch-tokens", str(chunk_tokens)]
    async with LocalCluster(SHAPES[arrangement], worker, log_dir, pin_workers_to_cores=True) as cluster:
        client = CompletionClient(f"{cluster.url}/v1", SERVED_NAME)
        await client.complete(workload.draw_random_tokens(plan.long, rng, vocab_size), plan.chat[1])  # warm-up
        before = between = await _read_counters(cluster)
        for _ in range(plan.alone):
            trace, earlier = await client.complete(workload.draw_random_tokens(plan.long, rng, vocab_size), 1), between
            if trace.error is not None or trace.timing.e2e is None:
                message = f"a request failed, although no other requests were running: {trace.error}"
                raise EmberlineError(message, hint=f"see the logs in {log_dir}")
            between = await _read_counters(cluster)
            computing = max(between[w]["busy_seconds"] - earlier[w]["busy_seconds"] for w in between)
            turn.alone.append(UnloadedTimes(trace.timing.e2e, computing))
        began = asyncio.get_running_loop().time()
        await _send_planned_requests(client, plan_requests(plan, seed, vocab_size), turn)
        turn.wall = asyncio.get_running_loop().time() - began
        after = await _read_counters(cluster)
        turn.prefills.update((await cluster.fetch_router_status() or {}).get("prefills", {}))
        client.close()
    for phase, earlier, later in (("alone", before, between), ("mixed", between, after)):
        turn.moved[phase] = {name: sum(later[w][name] - earlier[w][name] for w in later) for name in MOVED}
    turn.busy = {w: (after[w]["busy_seconds"] - between[w]["busy_seconds"]) / turn.wall for w in after}
    return turn


def plan_requests(plan: SplitBenchPlan, seed: int, vocab_size: int) -> list[PlannedRequest]:
    """Return long and short requests at random times. The number of requests follows from the rates of the plan."""
    rng, found = np.random.default_rng([seed, 1]), list[PlannedRequest]()
    for long, rate, (prompt, output) in (
        (True, plan.long_rate, (plan.long, plan.chat[1] // 2)),
        (False, plan.chat_rate, plan.chat),
    ):
        for at in rng.uniform(0.0, plan.seconds, max(1, round(rate * plan.seconds))).tolist():
            found.append(PlannedRequest(at, workload.draw_random_tokens(prompt, rng, vocab_size), output, long))
    return sorted(found, key=lambda arrival: arrival.at)


async def _send_planned_requests(
    client: CompletionClient, planned_requests: Sequence[PlannedRequest], run: SplitBenchRun
) -> None:
    async def send_at_arrival(arrival: PlannedRequest) -> None:
        await asyncio.sleep(arrival.at)
        run.traces[arrival.long].append(await client.complete(arrival.prompt, arrival.output))

    await asyncio.gather(*map(send_at_arrival, planned_requests))


async def _read_counters(cluster: LocalCluster) -> dict[str, dict[str, float]]:
    """Wait until no request is open, and return the counters of each worker by its name.

    Raises EmberlineError if a worker does not answer or does not become idle.
    """
    if held := await cluster.wait_until_idle():
        raise EmberlineError(f"workers still hold resources while no request is open: {held}")
    found: dict[str, dict[str, float]] = {}
    for child in cluster.workers:
        stats: dict[str, Any] | None = await cluster.fetch_worker_stats(child)
        if stats is None:
            raise EmberlineError(f"worker {child.name} does not answer", hint=f"see its log {child.log_file}")
        moved: dict[str, float] = stats["transfer"]
        found[child.name] = {"busy_seconds": stats["busy_seconds"], **{name: moved[name] for name in MOVED}}
    return found


# -- results -----------------------------------------------------------------------------------------------------------


def _add_results(
    report: BenchReport, chunk_tokens: int, split_runs: Sequence[SplitBenchRun], colocated_runs: Sequence[SplitBenchRun]
) -> None:
    for name, unit, value in _result_functions():
        for turns, beside in ((split_runs, colocated_runs), (colocated_runs, None)):
            figures = [value([turn]) for turn in turns]
            more: dict[str, Any] = {"spread": (min(figures), max(figures))}
            more |= {"peer": value(beside)} if beside is not None else {}
            report.add(f"{name}_{chunk_tokens}{'' if beside else '/colocated'}", value(turns), unit, **more)
    errors = [trace.error for turn in (*split_runs, *colocated_runs) for trace in turn.all_traces if trace.error]
    report.add(f"errors_{chunk_tokens}", len(errors), "requests")
    report.config[f"first_errors_{chunk_tokens}"] = sorted(set(errors))[:5]
    report.config[f"requests_{chunk_tokens}"] = {
        kind: sum(len(turn.traces[long]) for turn in split_runs) for kind, long in (("long", True), ("chat", False))
    }
    _add_busy_results(report, chunk_tokens, split_runs, colocated_runs)
    _add_handoff_results(report, chunk_tokens, split_runs, colocated_runs)


def _result_functions() -> Iterator[tuple[str, str, Callable[[Sequence[SplitBenchRun]], float]]]:
    """Yield the name, the unit and a function that computes the value of each result from one or more runs."""

    def percentile_ms(
        of: Callable[[SplitBenchRun], list[float]], percent: float
    ) -> Callable[[Sequence[SplitBenchRun]], float]:
        return lambda turns: 1e3 * float(np.percentile([x for turn in turns for x in of(turn)], percent))

    def output_rate(turns: Sequence[SplitBenchRun]) -> float:
        return sum(trace.tokens for turn in turns for trace in turn.all_traces) / sum(turn.wall for turn in turns)

    latencies: dict[str, Callable[[SplitBenchRun], list[float]]] = {
        "itl": SplitBenchRun.inter_token_seconds,
        "ttft_long": partial(SplitBenchRun.ttft_seconds, is_long=True),
        "ttft_chat": partial(SplitBenchRun.ttft_seconds, is_long=False),
    }
    for name, of in latencies.items():
        for label, percent in SHARES.items():
            yield f"{name}_{label}", "ms", percentile_ms(of, percent)
    yield "output", "tok/s", output_rate


def _add_busy_results(
    report: BenchReport, chunk_tokens: int, split_runs: Sequence[SplitBenchRun], colocated_runs: Sequence[SplitBenchRun]
) -> None:
    """Add the share of time in which each worker computed.

    A share near 1 means that this worker limits the throughput.
    """
    for turns in (split_runs, colocated_runs):
        for worker in turns[0].busy:
            report.add(f"busy_{chunk_tokens}_{worker}", [turn.busy[worker] for turn in turns], "of the time")


def _add_handoff_results(
    report: BenchReport, chunk_tokens: int, split_runs: Sequence[SplitBenchRun], colocated_runs: Sequence[SplitBenchRun]
) -> None:
    pairs = [
        pair for a, b in zip(split_runs, colocated_runs, strict=True) for pair in zip(a.alone, b.alone, strict=True)
    ]
    adds = [with_.non_compute_seconds - without.non_compute_seconds for with_, without in pairs]
    shares = [100 * added / without.computing for added, (_, without) in zip(adds, pairs, strict=True)]
    report.add(f"prefill_{chunk_tokens}", [1e3 * without.computing for _, without in pairs], "ms")
    report.add(f"handoff_{chunk_tokens}", [1e3 * added for added in adds], "ms")
    report.add(f"handoff_share_{chunk_tokens}", shares, "% of the prefill")
    report.config[f"prefills_{chunk_tokens}"] = dict(sum((turn.prefills for turn in split_runs), Counter()))
    for phase in ("alone", "mixed"):
        total = {name: sum(turn.moved[phase][name] for turn in split_runs) for name in MOVED}
        pulls = max(total["pulls"], 1)
        report.add(f"pulls_{phase}_{chunk_tokens}", total["pulls"], "requests")
        report.add(f"recomputed_{phase}_{chunk_tokens}", total["recomputed"], "requests")
        report.add(f"pulled_{phase}_{chunk_tokens}", total["pulled_bytes"] / pulls / 1e6, "MB each")
        report.add(f"copying_{phase}_{chunk_tokens}", 1e3 * total["copy_seconds"] / pulls, "ms each")
        if total["copy_seconds"]:
            hidden = 100 * total["hidden_seconds"] / total["copy_seconds"]
            report.add(f"copying_hidden_{phase}_{chunk_tokens}", hidden, "% of the copying")
