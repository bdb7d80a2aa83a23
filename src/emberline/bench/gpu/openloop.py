"""Measures latencies in an open loop: requests arrive at a given rate, whether or not the engine keeps up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np

from emberline.bench import workload
from emberline.bench.gpu.engine import boot_engine, is_measurement_selected, make_warm_up_lengths, run_measurement
from emberline.bench.gpu.job_run import VOCAB, Clock, MeasuredEngine, make_submission, run_job
from emberline.bench.job import BenchJob
from emberline.bench.report import BenchReport
from emberline.core.errors import EmberlineError

PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 256
RATES = (8.0,)  # requests per second
LOAD_SECONDS = 60.0  # during which requests arrive
DRAIN_TIMEOUT_S = 40.0  # for the last requests to end
PERCENTILES = (50, 90, 99)
SETTINGS: dict[str, Any] = {
    "max_running": 256,
    "max_batch_tokens": 8192,
    "max_context": 8192,
    "prefix_cache": False,
}
WARM_UP = "every eighth batch size, eight prompts at once and five seconds of the same load ran untimed"

Percentiles = tuple[float | None, ...]

# vLLM 0.24.0 on the same machine: inter-token latency and time to first token, p50 / p90 / p99 in ms
VLLM_FIGURES: dict[float, tuple[Percentiles, Percentiles]] = {
    2: ((5.8, 6.2, 77.7), (103, 176, 217)),
    4: ((6.8, 8.4, 84.7), (107, 195, 288)),
    6: ((8.9, 18.4, 110.6), (149, 359, 616)),
    8: ((13.8, 108.8, 216.5), (247, 485, None)),
}
# The same with max_num_batched_tokens=2048.
VLLM_2048_FIGURES: dict[float, tuple[Percentiles, Percentiles]] = {
    4: ((6.7, 8.6, 54.7), (123, 210, 282)),
    6: ((8.9, 51.7, 59.6), (192, 385, 615)),
    8: ((14.5, 62.1, 69.6), (336, 712, 917)),
}

_runs = count()


@dataclass(frozen=True, slots=True)
class OpenLoopRun:
    """The times of each request, in seconds since the start of the run.

    They are the time when the request was due, when it was submitted, and when each token arrived.
    """

    due: list[float]
    added: list[float]
    times: list[list[float]]
    unfinished: int

    @property
    def first_token_seconds(self) -> list[float]:
        """Seconds from the time at which each request was due to its first token.

        The time in which a request waited for the engine to accept it is included.
        """
        return [times[0] - due for due, times in zip(self.due, self.times, strict=True) if times]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between consecutive tokens of the same request, for all requests."""
        return [b - a for times in self.times for a, b in pairwise(times)]


def draw_arrivals(rate: float, duration_s: float, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process."""
    rng = np.random.default_rng(seed)
    due: list[float] = []
    at = float(rng.exponential(1 / rate))
    while at < duration_s:
        due.append(at)
        at += float(rng.exponential(1 / rate))
    return due


def latency_percentiles(values: Sequence[float]) -> list[float]:
    return [float(p) for p in np.percentile(values, PERCENTILES)]


def run_open_loop(
    engine: MeasuredEngine,
    job: BenchJob,
    due_times: list[float],
    timeout_s: float,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> OpenLoopRun:
    """Run engine steps, and submit each request before the first step that begins after its due time.

    At the timeout, return without aborting any request.
    """
    run = next(_runs)
    index = {f"flow{run}-{i}": i for i in range(len(due_times))}
    pending, times, added = deque(index.items()), [list[float]() for _ in due_times], list[float]()
    began = clock()
    while pending or not engine.idle:
        now = clock() - began
        if now > timeout_s:
            break
        while pending and due_times[pending[0][1]] <= now:
            name, i = pending.popleft()
            engine.add(make_submission(name, job.prompts[i], job.outputs[i]))
            added.append(now)
        if engine.idle:
            sleep(max(0.0, due_times[pending[0][1]] - now))
            continue
        outputs = engine.step()
        now = clock() - began
        for output in outputs:
            if (at := index.get(output.id)) is None:
                continue  # the end of a request of an earlier run
            if output.error is not None:
                raise EmberlineError(output.error)
            times[at] += [now] * len(output.tokens)
    unfinished = sum(len(t) < length for t, length in zip(times, job.outputs, strict=True))
    return OpenLoopRun(due_times, added, times, unfinished)


def make_open_loop_job(
    rate: float, duration_s: float, seed: int, *, prompt_tokens: int = PROMPT_TOKENS, output_tokens: int = OUTPUT_TOKENS
) -> tuple[BenchJob, list[float]]:
    due = draw_arrivals(rate, duration_s, seed)
    return workload.make_job([(prompt_tokens, output_tokens)] * len(due), VOCAB, seed), due


@dataclass(frozen=True, slots=True)
class OpenLoopBench:
    """Measures one engine and adds the results to a report.

    `peer` is the name of another engine (a peer), or "" for Emberline's engine.
    """

    report: BenchReport
    engine: MeasuredEngine
    seconds: float = LOAD_SECONDS
    peer: str = ""

    def __call__(self, rate: float) -> None:
        self.warm_up(rate)
        self.measure(rate)

    def warm_up(self, rate: float) -> None:
        run_job(self.engine, workload.make_job(make_warm_up_lengths(128), VOCAB))
        run_job(self.engine, workload.make_job([(PROMPT_TOKENS, 16)] * 8, VOCAB))
        self._check_finished(
            run_open_loop(self.engine, *make_open_loop_job(rate, 5.0, seed=1), timeout_s=5.0 + DRAIN_TIMEOUT_S)
        )

    def measure(self, rate: float) -> None:
        run = run_open_loop(
            self.engine, *make_open_loop_job(rate, self.seconds, seed=0), timeout_s=self.seconds + DRAIN_TIMEOUT_S
        )
        late = max((a - d for a, d in zip(run.added, run.due, strict=False)), default=0.0)
        facts = {"requests": len(run.due), "unfinished": run.unfinished, "waited_for_a_step_at_most_ms": 1e3 * late}
        self.report.config[f"open{rate:g}"] = facts
        self._add_percentiles(rate, "itl", run.token_gaps, 0)
        self._add_percentiles(rate, "ttft", run.first_token_seconds, 1)
        self._check_finished(run)

    def _add_percentiles(self, rate: float, latency_kind: str, seconds: list[float], vllm_figure_index: int) -> None:
        no_figures: Percentiles = (None,) * len(PERCENTILES)
        usual, small = (
            table[rate][vllm_figure_index] if rate in table else no_figures
            for table in (VLLM_FIGURES, VLLM_2048_FIGURES)
        )
        for p, value, peer, other in zip(PERCENTILES, latency_percentiles(seconds), usual, small, strict=True):
            name = f"open{rate:g}_{latency_kind}_p{p}_ms"
            if self.peer:
                self.report.add(f"{name}/{self.peer}", 1e3 * value, "ms")
                continue
            self.report.add(name, 1e3 * value, "ms", peer=peer)
            if other is not None:
                self.report.add(f"{name}/vllm-2048", other, "ms")

    @staticmethod
    def _check_finished(run: OpenLoopRun) -> None:
        if run.unfinished:
            raise EmberlineError(
                f"{run.unfinished} of {len(run.due)} requests had not finished when the time limit was reached"
            )


def measurement_names(rates: Sequence[float]) -> list[str]:
    return [f"open{rate:g}" for rate in rates]


def measure(
    report: BenchReport,
    name_patterns: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    rates: Sequence[float] = RATES,
    duration_s: float = LOAD_SECONDS,
) -> None:
    chosen = SETTINGS | (settings or {})
    report.config |= {"settings": chosen, "warm_up": WARM_UP, "seconds": duration_s}
    bench = OpenLoopBench(report, boot_engine(chosen).engine, duration_s)
    failures: dict[str, str] = report.config.setdefault("failed", {})
    for rate, name in zip(rates, measurement_names(rates), strict=True):
        if (
            is_measurement_selected(name, name_patterns) and not failures
        ):  # requests left over by a failed one would affect the next
            run_measurement(report, name, partial(bench, rate))
