"""`emberline bench rank-faults`: kills and stops ranks of an engine under load, and counts what goes wrong.

For each fault an engine is started, streams are opened, and one of its processes is killed or stopped, or its CUDA
context is broken. Then every open stream must end, the engine must answer again with the same tokens, and all processes
of the failed engine must be gone, and their GPU memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from emberline.bench.broken_context import broken_context_environment
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EngineFailed, EngineUnavailable
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.async_engine import AsyncEngine
from emberline.hub.source import resolve_model

MODEL = "model"
REQUEST_DEADLINE_S = 60.0  # after which a stream counts as hung
RECOVERY_DEADLINE_S = 120.0
REAP_DEADLINE_S = 10.0  # for the processes of the engine that failed to be gone
STALL_TIMEOUT_S = 4.0  # of the engine process, which may be stopped too
POLL_INTERVAL_S = 0.02
SIGNALS = {
    "cpu": (signal.SIGKILL, signal.SIGSTOP),
    "cuda": (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1),  # the last breaks the context: broken_context.py
}
MAX_GPU_MEMORY_LEFT = 64 << 20  # bytes above those before the first engine


@dataclass(frozen=True, slots=True)
class RankFaultSettings:
    model: str
    tp: int = 2
    pp: int = 1
    faults: int = 20
    streams: int = 4
    tokens: int = 32  # of each stream
    rank_timeout: float = 2.0
    seed: int = 0
    device: str = "cpu"  # or cuda: all ranks share the first GPU


@dataclass(slots=True)
class FaultCounts:
    """What happened in all faults so far."""

    faults: int = 0
    broken: int = 0  # streams that ended with an error, as they must if they were open
    hung: int = 0  # streams that did not end, or engines that did not answer again
    wrong: int = 0  # streams with other tokens than before the faults
    leaked: int = 0  # processes and file descriptors that were left, and engines that left GPU memory
    recovery_s: list[float] = field(default_factory=list)


def bench(settings: RankFaultSettings, log: Callable[[str], None]) -> BenchReport:
    with ExitStack() as stack:
        if settings.device == "cuda":
            stack.enter_context(broken_context_environment())
        return report_faults("rank-faults", settings, asyncio.run(_run_faults(settings, log)))


def report_faults(bench_name: str, settings: RankFaultSettings, counts: FaultCounts) -> BenchReport:
    names = "tp", "pp", "streams", "tokens", "rank_timeout", "seed", "device"
    config = {"model": settings.model, **{name: getattr(settings, name) for name in names}}
    report = BenchReport(bench_name, config)
    for name in ("faults", "hung", "wrong", "leaked"):
        report.add(name, float(getattr(counts, name)), "count")
    report.add("broken_streams", float(counts.broken), "count")
    if len(counts.recovery_s) > 1:
        report.add("recovery_p50_s", quantiles(counts.recovery_s, n=2)[0], "s")
        report.add("recovery_p90_s", quantiles(counts.recovery_s, n=10)[8], "s")
    return report


async def _run_faults(settings: RankFaultSettings, log: Callable[[str], None]) -> FaultCounts:
    counts, pick = FaultCounts(), random.Random(settings.seed)
    config = EngineConfig.build(str(resolve_model(settings.model)), **engine_settings(settings))
    expected: list[list[int]] = []
    fds: set[str] = set()
    memory = _used_gpu_memory() if settings.device == "cuda" else 0
    for index in range(settings.faults):
        engine = AsyncEngine({MODEL: config}, TimeSharingConfig(), stall_timeout=STALL_TIMEOUT_S)
        await engine.start()
        try:
            if not expected:
                expected += [await generate(engine, f"expected-{i}", i, settings) for i in range(settings.streams)]
            await _inject_fault(engine, index, expected, settings, counts, pick, log)
        finally:
            await engine.stop()
        fds = fds or _open_fds()
        counts.leaked += max(0, len(_open_fds()) - len(fds))
        if settings.device == "cuda":
            counts.leaked += _used_gpu_memory() > memory + MAX_GPU_MEMORY_LEFT
    return counts


def engine_settings(settings: RankFaultSettings) -> dict[str, Any]:
    parallel = {"tp": settings.tp, "pp": settings.pp, "rank_timeout": settings.rank_timeout}
    if settings.device == "cuda":
        parallel["ranks_per_gpu"] = settings.tp * settings.pp
        return {
            "device": "cuda",
            "dtype": "float32",
            "kv_tokens": 8192,
            "max_context": 512,
            "max_running": 8,
            **parallel,
        }
    return {"device": "cpu", "threads": 1, "kv_memory": 64 << 20, **parallel}


async def _inject_fault(
    engine: AsyncEngine,
    index: int,
    expected: list[list[int]],
    settings: RankFaultSettings,
    counts: FaultCounts,
    pick: random.Random,
    log: Callable[[str], None],
) -> None:
    assert engine.pid is not None
    pids = [engine.pid, *find_children(engine.pid)]  # the leader first
    streams = [
        asyncio.create_task(check_stream(engine, f"{index}-{i}", i, expected[i], settings, counts))
        for i in range(settings.streams)
    ]
    await asyncio.sleep(pick.uniform(0.0, 0.3))
    kinds = SIGNALS[settings.device]
    victim, kind = pids[index % len(pids)], kinds[index // len(pids) % len(kinds)]
    began = time.monotonic()
    os.kill(victim, kind)
    await asyncio.gather(*streams)
    recovery_s = await wait_for_recovery(engine, index, expected[0], settings, counts, began)
    left = await wait_until_gone(pids)
    counts.leaked += left
    counts.faults += 1
    rank = "leader" if victim == pids[0] else f"follower {index % len(pids)}"
    log(f"fault {index + 1}: {kind.name} of the {rank}, recovered in {recovery_s:.1f} s, {left} processes left")


async def generate(engine: AsyncEngine, name: str, prompt: int, settings: RankFaultSettings) -> list[int]:
    params = SamplingParams(max_tokens=settings.tokens, temperature=0.0, ignore_eos=True)
    submission = Submission(name, [40 + prompt, 50, 60 + prompt], params, model=MODEL)
    return [token async for output in engine.submit(submission) for token in output.tokens]


async def check_stream(
    engine: AsyncEngine, name: str, prompt: int, expected: list[int], settings: RankFaultSettings, counts: FaultCounts
) -> None:
    """Run a stream, and count whether it breaks, hangs or has wrong tokens."""
    try:
        tokens = await asyncio.wait_for(generate(engine, name, prompt, settings), REQUEST_DEADLINE_S)
        counts.wrong += tokens != expected
    except (EngineFailed, EngineUnavailable):
        counts.broken += 1
    except TimeoutError:
        counts.hung += 1


async def wait_for_recovery(
    engine: AsyncEngine,
    index: int,
    expected: list[int],
    settings: RankFaultSettings,
    counts: FaultCounts,
    began: float,
) -> float:
    """Send a request until the engine that follows the faulty one answers; return the seconds since the fault."""
    attempt = 0
    while (seconds := time.monotonic() - began) < RECOVERY_DEADLINE_S:
        attempt += 1
        try:
            tokens = await asyncio.wait_for(generate(engine, f"{index}-r{attempt}", 0, settings), REQUEST_DEADLINE_S)
        except (EngineFailed, EngineUnavailable, TimeoutError):
            await asyncio.sleep(POLL_INTERVAL_S)
            continue
        counts.wrong += tokens != expected
        if engine.restarts:  # else the fault has not shown yet
            seconds = time.monotonic() - began
            counts.recovery_s.append(seconds)
            return seconds
    counts.hung += 1
    return seconds


async def wait_until_gone(pids: list[int]) -> int:
    """Wait for processes to end, and return how many of them are left after a while."""
    deadline = time.monotonic() + REAP_DEADLINE_S
    while (left := sum(_is_running(pid) for pid in pids)) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL_S)
    return left


def _is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended. The parent of one that has ended may itself be stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def find_children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for file in files for child in file.read_text().split())


def _used_gpu_memory() -> int:
    """Return the bytes in use on the first GPU. This process itself has no CUDA context."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout) << 20


def _open_fds() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}
