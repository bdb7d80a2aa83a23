"""`emberline bench rank-faults`: kills and stops ranks of an engine under load, and counts what goes wrong.

For each fault, streams are opened, and a process of the engine is killed or stopped, or its CUDA context is broken.
After a quarter of these faults, a second process is killed while the engine restarts. After each fault, every open
stream must end, the engine must answer again with the same tokens, and the processes of the failed engine must have
ended and have released their GPU memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

from emberline.bench import machine
from emberline.bench.broken_context import breaking_contexts_on_signal
from emberline.bench.report import BenchReport, current_command, round_significant
from emberline.bench.tiny_checkpoint import write_tiny_checkpoint
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed, EngineUnavailable
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.async_engine import AsyncEngine, EngineState
from emberline.hub.source import resolve_model

MODEL = "model"
REQUEST_DEADLINE_S = 60.0  # after which a stream counts as hung
RECOVERY_DEADLINE_S = 120.0
REAP_DEADLINE_S = 10.0  # for the processes of a failed engine to end
STALL_TIMEOUT_S = 4.0  # of the engine process, which may be stopped too
RESTART_PAUSE_S = 1.0  # before each restart; by default, each pause would be twice as long as the one before
RECOVERY_TOKENS = 16  # of the request that shows that an engine answers again
TINY = "tiny"  # used as a model's name: a model with random weights, with streams so long that every fault hits them
TINY_TOKENS, DEFAULT_TOKENS = 1500, 32  # tokens of each stream of TINY, and of other models
TOKENIZER_MODEL = "smollm2"  # the model whose tokenizer TINY has
PROMPT_TOKENS = 3
POLL_INTERVAL_S = 0.02
RESTART_FAULT_SHARE = 0.25  # share of the faults after which a process of the restarting engine is killed too
MAX_RESTART_DELAY_S = 3.0  # from the restart to that second fault
SIGNALS = {
    "cpu": (signal.SIGKILL, signal.SIGSTOP),
    "cuda": (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1),  # the last breaks the context: broken_context.py
}
MAX_GPU_MEMORY_LEFT = 64 << 20  # bytes used in addition to those before the first engine started


@dataclass(frozen=True, slots=True)
class RankFaultSettings:
    model: str
    tp: int = 2
    pp: int = 1
    faults: int = 20
    streams: int = 4
    tokens: int = DEFAULT_TOKENS  # of each stream
    rank_timeout: float = 2.0
    seed: int = 0
    device: str = "cpu"  # or cuda: all ranks share the first GPU
    dp_attention: bool = False
    lanes: int = 1  # engines at the same time, each with a fault of its own
    seconds: float = 3600.0  # after which no further fault is injected


@dataclass(slots=True)
class FaultCounts:
    """What happened in all faults of a run so far."""

    faults: int = 0
    faults_while_starting: int = 0  # faults during a restart, which `faults` includes
    broken: int = 0  # streams that ended with an error, as they must if they were open
    hung: int = 0  # streams that did not end, or engines that did not answer again
    wrong: int = 0  # streams with other tokens than before the faults
    leaked: int = 0  # processes and file descriptors that were left, and GPU memory
    recovery_s: list[float] = field(default_factory=list)  # after faults under load


def default_tokens(model: str) -> int:
    """Return the default number of tokens of each stream. `model` is the name of a model, or TINY."""
    return TINY_TOKENS if model == TINY else DEFAULT_TOKENS


def bench(
    settings: RankFaultSettings,
    log: Callable[[str], None],
    earlier_runs: Sequence[dict[str, Any]] = (),
    stated_commit: str | None = None,
) -> BenchReport:
    """Inject the faults, and report the sums over this run and `earlier_runs`, the `runs` of an earlier report."""
    # An installed package has compiled files; with this variable a source tree would be compiled at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with ExitStack() as stack:
        model = str(resolve_model(TOKENIZER_MODEL if settings.model == TINY else settings.model))
        if settings.model == TINY:
            model = str(write_tiny_checkpoint(Path(stack.enter_context(TemporaryDirectory())), Path(model)))
        if settings.device == "cuda":
            stack.enter_context(breaking_contexts_on_signal())
        counts = asyncio.run(_run_faults(settings, model, log))
    counts.recovery_s = [round_significant(each, 3) for each in counts.recovery_s]
    source = {"command": current_command(), "commit": machine.describe_commit(stated_commit)}
    return report_runs([*earlier_runs, {**source, **asdict(settings), **asdict(counts)}])


def report_runs(runs: Sequence[dict[str, Any]]) -> BenchReport:
    """Return a report with the sums of several runs, whose engines may have different layouts of ranks."""
    total = FaultCounts()
    for run in runs:
        for name in asdict(total):
            setattr(total, name, getattr(total, name) + run[name])
    return report_faults("rank-faults", {"runs": list(runs)}, total)


def report_faults(bench_name: str, config: dict[str, Any], counts: FaultCounts) -> BenchReport:
    report = BenchReport(bench_name, config)
    for name in ("faults", "hung", "wrong", "leaked", "faults_while_starting"):
        report.add(name, float(getattr(counts, name)), "count")
    report.add("broken_streams", float(counts.broken), "count")
    if len(counts.recovery_s) > 1:
        report.add("recovery_p50_s", quantiles(counts.recovery_s, n=2)[0], "s")
        report.add("recovery_p90_s", quantiles(counts.recovery_s, n=10)[8], "s")
    return report


async def _run_faults(settings: RankFaultSettings, model: str, log: Callable[[str], None]) -> FaultCounts:
    config = EngineConfig.build(model, **engine_settings(settings))
    memory = _used_gpu_memory() if settings.device == "cuda" else 0
    async with _running_engine(config) as engine:
        streams = (generate(engine, f"expected-{i}", i, settings.tokens) for i in range(settings.streams))
        expected = await asyncio.gather(*streams)
    injector, num_fds = FaultInjector(settings, config, expected, log), _count_open_fds()
    indexes = iter(range(settings.faults))
    await asyncio.gather(*(injector.run(indexes) for _ in range(settings.lanes)))
    counts = injector.counts
    counts.leaked += max(0, _count_open_fds() - num_fds)
    if settings.device == "cuda":
        counts.leaked += _used_gpu_memory() > memory + MAX_GPU_MEMORY_LEFT
    return counts


@asynccontextmanager
async def _running_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        {MODEL: config}, TimeSharingConfig(), stall_timeout=STALL_TIMEOUT_S, max_restart_pause=RESTART_PAUSE_S
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def engine_settings(settings: RankFaultSettings) -> dict[str, Any]:
    parallel: dict[str, Any] = {"tp": settings.tp, "pp": settings.pp, "rank_timeout": settings.rank_timeout}
    if settings.dp_attention:
        parallel["dp_attention"] = True
    if settings.device == "cuda":
        parallel["ranks_per_gpu"] = settings.tp * settings.pp
        return {
            "device": "cuda",
            "dtype": "float32",
            "kv_tokens": 8192,
            "max_context": max(512, PROMPT_TOKENS + settings.tokens),
            "max_running": 8,
            **parallel,
        }
    return {"device": "cpu", "threads": 1, "kv_memory": 64 << 20, **parallel}


class FaultInjector:
    def __init__(
        self,
        settings: RankFaultSettings,
        config: EngineConfig,
        expected: list[list[int]],
        log: Callable[[str], None],
    ) -> None:
        """`expected`: the tokens that each stream must have."""
        self._settings, self._config, self._expected, self._log = settings, config, expected, log
        self._deadline = time.monotonic() + settings.seconds
        self.counts = FaultCounts()

    async def run(self, indexes: Iterator[int]) -> None:
        """Inject the faults with these indexes into one engine, one after the other."""
        async with _running_engine(self._config) as engine:
            for index in indexes:
                await self._inject_fault(engine, index)
                if time.monotonic() > self._deadline:
                    break
            pids = _find_engine_pids(engine)
        self.counts.leaked += await wait_until_gone(pids)

    async def _inject_fault(self, engine: AsyncEngine, index: int) -> None:
        settings, counts, pids = self._settings, self.counts, _find_engine_pids(engine)
        restarts_before = engine.restarts
        pick = random.Random(f"{settings.seed}-{index}")
        streams = [
            asyncio.create_task(check_stream(engine, f"{index}-{i}", i, self._expected[i], settings, counts))
            for i in range(settings.streams)
        ]
        await asyncio.sleep(pick.uniform(0.0, 0.3))
        kinds = SIGNALS[settings.device]
        victim, kind = pids[index % len(pids)], kinds[index // len(pids) % len(kinds)]
        began = time.monotonic()
        os.kill(victim, kind)
        counts.faults += 1
        await asyncio.gather(*streams)
        rank = "leader" if victim == pids[0] else f"follower {index % len(pids)}"
        description = f"fault {index + 1}: {kind.name} of the {rank}"
        is_hit_again = pick.random() < RESTART_FAULT_SHARE
        if is_hit_again:
            pids += await self._kill_while_restarting(engine, restarts_before + 1, pick)
            began = time.monotonic()
            description += ", and SIGKILL while the engine restarted"
        restarts = restarts_before + 1 + is_hit_again
        recovery_s = await wait_for_recovery(engine, index, self._expected[0], counts, began, restarts)
        if not is_hit_again:
            counts.recovery_s.append(recovery_s)
        left = await wait_until_gone(pids)
        counts.leaked += left
        self._log(f"{description}, recovered in {recovery_s:.1f} s, {left} processes left")

    async def _kill_while_restarting(self, engine: AsyncEngine, restarts: int, pick: random.Random) -> list[int]:
        """Kill a process of an engine during its restart number `restarts`. Return the pids of all its processes."""
        num_ranks, deadline = self._settings.tp * self._settings.pp, time.monotonic() + RECOVERY_DEADLINE_S
        while engine.restarts < restarts or len(_find_engine_pids(engine)) < num_ranks:
            if time.monotonic() > deadline:
                self.counts.hung += 1
                return []
            await asyncio.sleep(POLL_INTERVAL_S)
        await asyncio.sleep(pick.uniform(0.0, MAX_RESTART_DELAY_S))
        pids = _find_engine_pids(engine)
        self.counts.faults += 1
        self.counts.faults_while_starting += engine.state is not EngineState.READY
        os.kill(pick.choice(pids), signal.SIGKILL)
        return pids


def _find_engine_pids(engine: AsyncEngine) -> list[int]:
    """Return the pids of an engine's processes, the leader's first."""
    assert engine.pid is not None
    return [engine.pid, *find_children(engine.pid)]


async def generate(engine: AsyncEngine, name: str, prompt: int, num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    submission = Submission(name, [40 + prompt, 50, 60 + prompt], params, model=MODEL)
    return [token async for output in engine.submit(submission) for token in output.tokens]


async def check_stream(
    engine: AsyncEngine, name: str, prompt: int, expected: list[int], settings: RankFaultSettings, counts: FaultCounts
) -> None:
    """Run a stream, and count whether it breaks, hangs or has wrong tokens."""
    try:
        tokens = await asyncio.wait_for(generate(engine, name, prompt, settings.tokens), REQUEST_DEADLINE_S)
        counts.wrong += tokens != expected
    except (EngineFailed, EngineUnavailable):
        counts.broken += 1
    except TimeoutError:
        counts.hung += 1


async def wait_for_recovery(
    engine: AsyncEngine,
    index: int,
    expected: list[int],
    counts: FaultCounts,
    began: float,
    restarts: int = 1,
) -> float:
    """Repeat a request until the engine has had `restarts` restarts and answers. Return the seconds since `began`."""
    attempt, expected = 0, expected[:RECOVERY_TOKENS]
    while (seconds := time.monotonic() - began) < RECOVERY_DEADLINE_S:
        attempt += 1
        try:
            request = generate(engine, f"{index}-r{attempt}", 0, len(expected))
            tokens = await asyncio.wait_for(request, REQUEST_DEADLINE_S)
        except (EngineFailed, EngineUnavailable, TimeoutError):
            await asyncio.sleep(POLL_INTERVAL_S)
            continue
        counts.wrong += tokens != expected
        if engine.restarts >= restarts:  # else the fault has not shown yet
            return time.monotonic() - began
    counts.hung += 1
    return seconds


async def wait_until_gone(pids: list[int]) -> int:
    """Wait for processes to end, and return how many of them are left after a while."""
    deadline = time.monotonic() + REAP_DEADLINE_S
    while (left := sum(_is_running(pid) for pid in pids)) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL_S)
    return left


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie, which it stays if its parent is stopped and cannot reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def find_children(pid: int) -> list[int]:
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or the process has ended meanwhile
            children += map(int, file.read_text().split())
    return sorted(children)


def _used_gpu_memory() -> int:
    """Return the bytes in use on the first GPU. This process itself has no CUDA context."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout) << 20


def _count_open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
