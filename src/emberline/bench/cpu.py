"""`emberline bench cpu`: the throughput of Emberline and of other engines on the CPU.

The engines take turns within one run, so that noise on the machine affects all of them.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from emberline.bench import machine_limits, workload
from emberline.bench.bench_task import BenchTask, TaskKind
from emberline.bench.contender import ContenderFailed, ContenderProcess, ContenderRun
from emberline.bench.contenders import BenchEnvironment, make_emberline_spec, make_peer_spec
from emberline.bench.machine_limits import MachineLimits, TokenCost
from emberline.bench.processes import measure_busy_cores
from emberline.bench.report import BenchReport
from emberline.core.config import cache_dir
from emberline.core.cpus import core_count
from emberline.core.errors import EmberlineError
from emberline.core.jsonfile import read_object
from emberline.hub.builtin_models import KNOWN_MODELS
from emberline.hub.pull import pull_gguf
from emberline.hub.source import resolve_model
from emberline.models.config import ModelConfig

TASKS = ("prefill_512", "prefill_2048", "decode_1", "decode_4", "decode_8", "decode_16", "mix_64")
SINGLE_ROUND_AFTER_S = 30.0  # seconds; a contender that takes longer for a task runs it once
PAUSE_BETWEEN_RUNS_S = (
    0.5  # seconds between runs, in which no contender has work: cores busy then disturb the measurement
)
MAX_IDLE_CORES = 0.1  # busy cores that do not count as a disturbance
WARM_UP = (32, 4)  # prompt and output tokens of the warm-up job


@dataclass(frozen=True, slots=True)
class CPUBenchSettings:
    threads: int
    rounds: int
    deadline: float  # seconds for a job
    idle_wait_s: float  # seconds that a measurement waits for an idle machine

    def wait_for_idle_machine(self) -> float:
        """Wait until other processes use almost no CPU time, at most `idle_wait_s` seconds.

        Return how many cores were busy in the last interval.
        """
        until = time.monotonic() + self.idle_wait_s
        while (noise := measure_busy_cores(PAUSE_BETWEEN_RUNS_S)) > MAX_IDLE_CORES and time.monotonic() < until:
            pass
        return noise


@dataclass(frozen=True, slots=True)
class MeasuredContender:
    """One of the compared engines and the results of its runs."""

    contender: ContenderProcess
    runs: dict[str, list[ContenderRun]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)  # cores busy with other work before each run

    @property
    def name(self) -> str:
        return self.contender.spec.name

    def token_rates(self, task: BenchTask) -> list[float]:
        return [task.token_rate(run.timeline) for run in self.runs.get(task.name, [])]


def bench(
    model: str, peer_names: list[str], task_names: list[str], settings: CPUBenchSettings, peers_dir: Path
) -> BenchReport:
    ground = _prepare_environment(model, settings.threads or core_count(), peers_dir)
    config = ModelConfig.from_hf(read_object(ground.model / "config.json"))
    tasks = [BenchTask.from_name(name, config.vocab) for name in task_names]
    settings.wait_for_idle_machine()
    top = machine_limits.measure_limits(ground.threads)
    with ExitStack() as stack:
        entries, absent = _start_contenders(ground, peer_names, config.vocab, stack)
        for task in tasks:
            for turn in range(settings.rounds):
                for entry in entries:
                    run_round(entry, task, turn, settings)
    settings.wait_for_idle_machine()
    top = top.merge_maximum(
        machine_limits.measure_limits(ground.threads)
    )  # the median drops a disturbance of single runs
    report = BenchReport(
        "cpu", {"model": model, "threads": ground.threads, "rounds": settings.rounds, "ceiling": top.how}
    )
    report.add("read_bandwidth", top.bandwidth / 1e9, "GB/s")
    report.add("matmul", top.flops / 1e9, "GFLOP/s")
    report.add("noise", [noise for entry in entries for noise in entry.noise], "cores")
    _add_start_times(report, *entries)
    for task in tasks:
        _add_task_results(report, task, TokenCost.from_config(config), top, *entries)
    report.config["contenders"] = {entry.name: entry.contender.facts for entry in entries}
    report.config["failed"] = absent | {entry.name: entry.failed for entry in entries if entry.failed}
    return report


def _prepare_environment(model: str, threads: int, peers_dir: Path) -> BenchEnvironment:
    gguf = Path(model) if model.endswith(".gguf") else None
    if model in KNOWN_MODELS and KNOWN_MODELS[model].is_gguf:
        gguf = pull_gguf(model, cache_dir())
    return BenchEnvironment(resolve_model(model, as_safetensors=True), gguf, threads, peers_dir)


def _start_contenders(
    environment: BenchEnvironment, peer_names: list[str], vocab_size: int, exit_stack: ExitStack
) -> tuple[list[MeasuredContender], dict[str, Any]]:
    entries: list[MeasuredContender] = []
    absent: dict[str, Any] = {}
    us, them = (
        make_emberline_spec(environment),
        [make_peer_spec(name, environment) for name in peer_names],
    )  # raises for unknown names
    for spec in (us, *them):
        try:
            contender = ContenderProcess(spec, environment.peers_dir / "logs" / f"{spec.name}.log")
            exit_stack.callback(contender.stop)
            contender.run_job(workload.make_job([WARM_UP], vocab_size), timeout_s=600.0)
            entries.append(MeasuredContender(contender))
            _print_progress(f"{spec.name}: ready in {contender.ready_seconds:.1f} s")
        except (ContenderFailed, ValueError) as e:
            if spec is us:
                raise EmberlineError(f"Emberline's engine did not start: {e}") from e
            absent[spec.name] = {"start": str(e)}
            _print_progress(f"{spec.name}: {e}")
    return entries, absent


def run_round(entry: MeasuredContender, task: BenchTask, round_index: int, settings: CPUBenchSettings) -> None:
    done = entry.runs.setdefault(task.name, [])
    slow = bool(done) and done[0].timeline.wall_seconds > SINGLE_ROUND_AFTER_S
    if slow or task.name in entry.failed or not entry.contender.is_alive:
        return
    noise = settings.wait_for_idle_machine()
    entry.noise.append(noise)
    try:
        done.append(entry.contender.run_job(task.job, settings.deadline))
        disturbed = f" (disturbed: {noise:.1f} cores busy)" if noise > MAX_IDLE_CORES else ""
        _print_progress(
            f"{task.name} {round_index + 1} {entry.name}: {task.token_rate(done[-1].timeline):,.1f} tok/s{disturbed}"
        )
    except (ContenderFailed, ValueError) as e:
        entry.failed[task.name] = str(e)
        _print_progress(f"{task.name} {round_index + 1} {entry.name}: {e}")


def _add_start_times(report: BenchReport, own_entry: MeasuredContender, *peer_entries: MeasuredContender) -> None:
    """Add to the report how many seconds each engine's process took from its start until it was ready.

    All files were already in the page cache, so these are warm starts.
    """
    best = min((e.contender.ready_seconds for e in peer_entries if e.contender.spec.same_weights), default=None)
    report.add("ready", own_entry.contender.ready_seconds, "s", peer=best)
    for phase, seconds in own_entry.contender.facts["seconds"].items():
        report.add(f"ready_{phase}", seconds, "s")
    for entry in peer_entries:
        report.add(f"ready/{entry.name}", entry.contender.ready_seconds, "s")


def _add_task_results(
    report: BenchReport,
    task: BenchTask,
    cost: TokenCost,
    limits: MachineLimits,
    own_entry: MeasuredContender,
    *peer_entries: MeasuredContender,
) -> None:
    mine = own_entry.runs[task.name]
    if not mine:
        return  # listed among the failures
    theirs = [(entry, rates) for entry in peer_entries if (rates := entry.token_rates(task))]
    best = max((median(rates) for entry, rates in theirs if entry.contender.spec.same_weights), default=None)
    report.add(task.name, own_entry.token_rates(task), "tok/s", peer=best, limit=task.max_token_rate(cost, limits))
    for entry, rates in theirs:
        report.add(f"{task.name}/{entry.name}", rates, "tok/s")
    if task.kind is TaskKind.DECODE:
        report.add(f"{task.name}_step", [run.timeline.median_step_seconds() * 1e3 for run in mine], "ms")
    if task.kind is not TaskKind.PREFILL:
        report.add(
            f"{task.name}_host", [run.counters["host"] / run.timeline.num_tokens * 1e6 for run in mine], "us/token"
        )


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
