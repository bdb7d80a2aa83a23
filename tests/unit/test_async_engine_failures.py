"""AsyncEngine with a process that dies, hangs or does not start: requests end with an error, and it is restarted.

An engine process also ends when its client is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EmberlineError, EngineFailed, EngineUnavailable
from emberline.core.events import Stats
from emberline.core.params import SamplingParams
from emberline.core.request import Priority, Submission
from emberline.engine import async_engine
from emberline.engine.async_engine import AsyncEngine, EngineState
from emberline.engine.messages import StartEngine, encode_message

STARTED = """
import socket, sys, time
from emberline.core.events import Stats
from emberline.engine.messages import EngineUpdate, Ready, encode_message
engine = socket.socket(fileno=int(sys.argv[1]))
engine.recv(1 << 16)
"""
READY = STARTED + "engine.sendall(encode_message(Ready({})))\n"
# Writing to it fails and closes the client's transport.
READY_WITHOUT_READING = (
    STARTED + "engine.shutdown(socket.SHUT_RD)\nengine.sendall(encode_message(Ready({})))\ntime.sleep(60)"
)
THEN_DIES = READY + "engine.recv(1 << 16)"
THEN_HANGS_UP = READY + "engine.recv(1 << 16); engine.close(); time.sleep(20)"
UPDATE = "engine.sendall(encode_message(EngineUpdate('m', [], Stats())))"
THEN_REPORTS = READY + f"engine.recv(1 << 16); {UPDATE}; time.sleep(60)"
THEN_HANGS = READY + "time.sleep(60)"
KEEPS_REPORTING = READY + f"while not time.sleep(0.02): {UPDATE}"
# A step that does not end: its kernels make progress for a while, then none.
COMPUTES_THEN_HANGS = (
    "from emberline.engine.process_loop import report_progress\n"  # slow, so before it is ready
    + READY
    + """
done = iter(range(13))
report_progress(engine, lambda: next(done, 12), interval=0.25)
"""
)
BOOTS_FOR_EVER = """
import sys, threading, types
boots = types.ModuleType("emberline.engine.engine_group_boot")
boots.boot_engine_group = lambda *_: (print("boots", flush=True), threading.Event().wait())
sys.modules[boots.__name__] = boots
from emberline.engine import process
sys.exit(process.main())
"""

Run = Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def running_engine(script: str, stall_timeout: float = 120.0) -> AsyncIterator[AsyncEngine]:
    command = sys.executable, "-c", script
    engine = AsyncEngine(
        {"m": EngineConfig.build("m")}, TimeSharingConfig(), stall_timeout=stall_timeout, command=command
    )
    try:
        await asyncio.wait_for(engine.start(), 60)
        yield engine
    finally:
        await engine.stop()


async def submit_one(engine: AsyncEngine, turns: int = 0) -> EmberlineError:
    """Submit a request after `turns` iterations of the event loop, and return the error it ends with."""
    for _ in range(turns):
        await asyncio.sleep(0)
    submission = Submission(name := f"{turns}", [1], SamplingParams(), Priority.INTERACTIVE, "", 10.0, "m")
    try:
        async with asyncio.timeout(30):
            async for _ in engine.submit(submission):
                pass
    except EmberlineError as e:
        engine.set_peers("m", [])
        engine.watch_blocks()
        engine.abort_completion(name, 0)
        return e
    raise AssertionError("it ended well")


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MAX_RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(async_engine, "REAP_TIMEOUT_S", 0.05)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_submission_while_the_process_dies_fails(short_timeouts: None, run: Run) -> None:
    async def main() -> None:
        async with running_engine(READY_WITHOUT_READING) as engine:
            ends = await asyncio.gather(*(submit_one(engine, turns) for turns in range(8)))
        assert {*map(type, ends)} == {EngineFailed, EngineUnavailable}  # the first one was sent without an error
        assert engine.num_open_submissions == 0

    run(main())


class FailingSpawns:
    """Makes spawning fail a given number of times, from a given process on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, times: int) -> None:
        self.count, self._popen = 0, subprocess.Popen
        self._failing = range(first, first + times)
        monkeypatch.setattr(subprocess, "Popen", self._spawn)

    def _spawn(self, *args: Any, **others: Any) -> subprocess.Popen[bytes]:
        self.count += 1
        if self.count - 1 in self._failing:
            raise OSError(12, "Cannot allocate memory")
        return self._popen(*args, **others)


def test_start_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        FailingSpawns(monkeypatch, 0, 1)
        with pytest.raises(EngineFailed, match="Cannot allocate memory"):
            async with running_engine(READY):
                pass

    asyncio.run(asyncio.wait_for(main(), 20))


def test_failed_restart_is_retried(short_timeouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        spawning = FailingSpawns(monkeypatch, 1, 2)
        async with running_engine(THEN_DIES) as engine:
            assert isinstance(await submit_one(engine), EngineFailed)
            while engine.state is not EngineState.READY:
                await asyncio.sleep(0.01)
            assert spawning.count == 4 and engine.restarts == 3

    asyncio.run(asyncio.wait_for(main(), 30))


def test_error_in_a_report_handler_ends_open_requests(short_timeouts: None) -> None:
    def raise_error(model: str, stats: Stats) -> None:
        raise KeyError(model)

    async def main() -> None:
        async with running_engine(THEN_REPORTS) as engine:
            engine.on_stats = raise_error
            assert "KeyError" in (await submit_one(engine)).message

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(("script", "stall_timeout"), [(THEN_HANGS_UP, 120.0), (THEN_HANGS, 0.4)])
def test_unkillable_process_does_not_delay_the_restart(
    short_timeouts: None, monkeypatch: pytest.MonkeyPatch, script: str, stall_timeout: float, run: Run
) -> None:
    async def main() -> None:
        async with running_engine(script, stall_timeout) as engine:
            pid = engine.pid
            assert pid is not None
            with monkeypatch.context() as patched:
                patched.setattr(subprocess.Popen, "kill", lambda process: None)
                end = await submit_one(engine)
            os.kill(pid, signal.SIGKILL)
            assert "still running" in end.message

    run(main())


def test_suspended_machine_is_not_a_stall(short_timeouts: None) -> None:
    async def main() -> None:
        async with running_engine(KEEPS_REPORTING, stall_timeout=0.8) as engine:
            pid = engine.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.2)  # the event loop does not run either
            asyncio.get_running_loop().call_later(0.05, os.kill, pid, signal.SIGCONT)
            await asyncio.sleep(1.2)
            assert engine.pid == pid and engine.restarts == 0 and engine.state is EngineState.READY
            os.kill(pid, signal.SIGSTOP)  # only the process
            assert isinstance(await submit_one(engine), EngineFailed)

    asyncio.run(main())


def test_progress_within_a_step_prevents_a_stall() -> None:
    async def main() -> None:
        async with running_engine(COMPUTES_THEN_HANGS, stall_timeout=2.0) as engine:  # 3 s of progress
            assert isinstance(await submit_one(engine), EngineFailed)
            assert engine.progress_reports == 12

    asyncio.run(main())


def test_process_ends_with_its_client_and_not_before() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", BOOTS_FOR_EVER, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process:
        try:
            theirs.close()
            ours.sendall(encode_message(StartEngine({"m": EngineConfig.build("m", device="cpu")}, TimeSharingConfig())))
            assert process.stdout is not None and process.stdout.readline() == b"boots\n"
            process.terminate()  # a service manager signals all processes of a service
            ours.close()
            assert process.wait(20) == 1
        finally:
            process.kill()
