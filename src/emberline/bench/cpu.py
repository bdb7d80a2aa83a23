"""`emberline bench cpu`: we and the peers in one run, turn by turn, so that a noisy machine is unfair to no one."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from emberline.bench import ceiling, workload
from emberline.bench.ceiling import Ceiling, Cost
from emberline.bench.contender import Contender, ContenderFailed, Run
from emberline.bench.lineup import Ground, ours, peer
from emberline.bench.processes import busy_cores
from emberline.bench.report import Report
from emberline.bench.task import Kind, Task
from emberline.core.config import cache_dir, core_count
from emberline.core.errors import EmberlineError
from emberline.core.jsonfile import read_object
from emberline.hub.pull import KNOWN, pulled_gguf
from emberline.hub.source import resolve
from emberline.models.config import ModelConfig

TASKS = ("prefill_512", "prefill_2048", "decode_1", "decode_4", "decode_8", "decode_16", "mix_64")
SLOW = 30.0  # seconds: a contender that takes longer for a task gets one round of it
PAUSE = 0.5  # seconds between turns, in which no contender has work: who is busy then disturbs the measurement
QUIET = 0.1  # busy cores that do not count
WARM_UP = (32, 4)  # tokens in and out, before anything is measured


@dataclass(frozen=True, slots=True)
class Rules:
    threads: int
    rounds: int
    deadline: float  # seconds that a job may take
    patience: float  # seconds that a measurement may wait for the machine to be quiet

    def quiet(self) -> float:
        """Waits as long as it may; returns the cores that were busy last."""
        until = time.monotonic() + self.patience
        while (noise := busy_cores(PAUSE)) > QUIET and time.monotonic() < until:
            pass
        return noise


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender and what it has done so far."""

    contender: Contender
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)  # cores busy with something else before each turn

    @property
    def name(self) -> str:
        return self.contender.spec.name

    def rates(self, task: Task) -> list[float]:
        return [task.rate(run.timeline) for run in self.runs.get(task.name, [])]


def bench(model: str, peers: list[str], names: list[str], rules: Rules, root: Path) -> Report:
    ground = _ground(model, rules.threads or core_count(), root)
    config = ModelConfig.from_hf(read_object(ground.model / "config.json"))
    tasks = [Task.make(name, config.vocab) for name in names]
    rules.quiet()
    top = ceiling.measure(ground.threads)
    with ExitStack() as stack:
        entries, absent = _start(ground, peers, config.vocab, stack)
        for task in tasks:
            for turn in range(rules.rounds):
                for entry in entries:
                    _turn(entry, task, turn, rules)
    rules.quiet()
    top = top.or_better(ceiling.measure(ground.threads))  # whatever disturbed one of them was not there all the time
    report = Report("cpu", {"model": model, "threads": ground.threads, "rounds": rules.rounds, "ceiling": top.how})
    report.add("read_bandwidth", top.bandwidth / 1e9, "GB/s")
    report.add("matmul", top.flops / 1e9, "GFLOP/s")
    report.add("noise", [noise for entry in entries for noise in entry.noise], "cores")
    _starts(report, *entries)
    for task in tasks:
        _figures(report, task, Cost.of(config), top, *entries)
    report.config["contenders"] = {entry.name: entry.contender.facts for entry in entries}
    report.config["failed"] = absent | {entry.name: entry.failed for entry in entries if entry.failed}
    return report


def _ground(model: str, threads: int, root: Path) -> Ground:
    gguf = Path(model) if model.endswith(".gguf") else None
    if model in KNOWN and KNOWN[model].member.endswith(".gguf"):
        gguf = pulled_gguf(model, cache_dir())
    return Ground(resolve(model), gguf, threads, root)


def _start(ground: Ground, peers: list[str], vocab: int, stack: ExitStack) -> tuple[list[Entry], dict[str, Any]]:
    entries: list[Entry] = []
    absent: dict[str, Any] = {}
    us, them = ours(ground), [peer(name, ground) for name in peers]  # who is not known is said before any starts
    for spec in (us, *them):
        try:
            contender = Contender(spec, ground.root / "logs" / f"{spec.name}.log")
            stack.callback(contender.stop)
            contender.run(workload.job([WARM_UP], vocab), deadline=600.0)
            entries.append(Entry(contender))
            _say(f"{spec.name}: ready in {contender.ready_seconds:.1f} s")
        except (ContenderFailed, ValueError) as e:
            if spec is us:
                raise EmberlineError(f"our own engine did not start: {e}") from e
            absent[spec.name] = {"start": str(e)}
            _say(f"{spec.name}: {e}")
    return entries, absent


def _turn(entry: Entry, task: Task, turn: int, rules: Rules) -> None:
    done = entry.runs.setdefault(task.name, [])
    slow = bool(done) and done[0].timeline.wall > SLOW
    if slow or task.name in entry.failed or not entry.contender.alive:
        return
    noise = rules.quiet()
    entry.noise.append(noise)
    try:
        done.append(entry.contender.run(task.job, rules.deadline))
        disturbed = f" (disturbed: {noise:.1f} cores busy)" if noise > QUIET else ""
        _say(f"{task.name} {turn + 1} {entry.name}: {task.rate(done[-1].timeline):,.1f} tok/s{disturbed}")
    except (ContenderFailed, ValueError) as e:
        entry.failed[task.name] = str(e)
        _say(f"{task.name} {turn + 1} {entry.name}: {e}")


def _starts(report: Report, us: Entry, *others: Entry) -> None:
    """From the start of the process to the first job taken; files are in the page cache, for the peers too."""
    best = min((e.contender.ready_seconds for e in others if e.contender.spec.same_weights), default=None)
    report.add("ready", us.contender.ready_seconds, "s", peer=best)
    for phase, seconds in us.contender.facts["seconds"].items():
        report.add(f"ready_{phase}", seconds, "s")
    for entry in others:
        report.add(f"ready/{entry.name}", entry.contender.ready_seconds, "s")


def _figures(report: Report, task: Task, cost: Cost, top: Ceiling, us: Entry, *others: Entry) -> None:
    mine = us.runs[task.name]
    if not mine:
        return  # it is among the failures
    theirs = [(entry, rates) for entry in others if (rates := entry.rates(task))]
    best = max((median(rates) for entry, rates in theirs if entry.contender.spec.same_weights), default=None)
    report.add(task.name, us.rates(task), "tok/s", peer=best, limit=task.limit(cost, top))
    for entry, rates in theirs:
        report.add(f"{task.name}/{entry.name}", rates, "tok/s")
    if task.kind is Kind.DECODE:
        report.add(f"{task.name}_step", [run.timeline.step() * 1e3 for run in mine], "ms")
    if task.kind is not Kind.PREFILL:
        report.add(f"{task.name}_host", [run.counters["host"] / run.timeline.tokens * 1e6 for run in mine], "us/token")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
