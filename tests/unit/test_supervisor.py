"""What belongs together is started again, though it cannot be at once, and stopped together, though one has gone."""

from __future__ import annotations

import argparse
import asyncio
import errno
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from emberline.cli import cluster
from emberline.cluster import supervisor
from emberline.cluster.supervisor import SupervisedProcess, Supervisor
from emberline.core.errors import InvalidRequest

SLEEPS = (sys.executable, "-c", "import time; time.sleep(60)")


def child(name: str, log: Path, *program: str) -> SupervisedProcess:
    return SupervisedProcess(name, [], log, os.environ, program, immediate_restarts_left=0, restart_pause_s=0.01)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.005)


def test_failed_restart_is_retried(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        them, logs = Supervisor(lambda who, what: said.append(what)), tmp_path / "logs"
        one = child("one", logs / "log", *SLEEPS)
        await them.start(one)
        try:
            assert one.process is not None
            (logs / "log").unlink()
            logs.rmdir()
            logs.touch()  # no folder can be made there
            one.process.kill()
            await until(lambda: any("start failed" in what for what in said))
            logs.unlink()
            await until(lambda: one.restarts == 1)
        finally:
            await them.stop()
        assert one.process.returncode is not None and (logs / "log").exists()

    asyncio.run(main())


def test_unstarted_process_does_not_block_stop(tmp_path: Path) -> None:
    async def main() -> None:
        them = Supervisor(lambda who, what: None)
        one = child("one", tmp_path / "log", *SLEEPS)
        await them.start(one)
        try:
            with pytest.raises(FileNotFoundError):
                await them.start(child("two", tmp_path / "log", str(tmp_path / "nothing")))
        finally:
            await them.stop()
        assert one.process is not None and one.process.returncode is not None

    asyncio.run(main())


def test_first_restarts_are_immediate_later_ones_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paused: list[float] = []
    said: list[str] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 3:
            await asyncio.Event().wait()

    async def main() -> None:
        them = Supervisor(lambda who, what: said.append(what))
        one = SupervisedProcess("one", [], tmp_path / "log", os.environ, (sys.executable, "-c", ""))
        real = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", pause)
        await them.start(one)
        async with asyncio.timeout(60):
            while len(paused) < 3:
                await real(0.01)
        monkeypatch.undo()
        assert one.restarts == supervisor.IMMEDIATE_RESTARTS + 2
        await them.stop()

    asyncio.run(main())
    assert paused == [0.5, 1.0, 2.0] and sum("restarts now" in what for what in said) == supervisor.IMMEDIATE_RESTARTS


SUPERVISING = """
import asyncio, os, sys
from pathlib import Path
from emberline.cluster.supervisor import SupervisedProcess, Supervisor

async def main():
    them = Supervisor(lambda who, what: None)
    for name in ("one", "two"):
        child = SupervisedProcess(name, [], Path(sys.argv[1]) / name, os.environ, (sys.executable, "-c", sys.argv[2]))
        await them.start(child)
        print(child.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
SUPERVISED = """
import sys, time
from emberline.core import parent_death
from emberline.core.environment import is_supervised

assert is_supervised() and not is_supervised()
if PORTABLE:
    sys.platform = "darwin"
parent_death.end_with_parent()
print("runs", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("portable", [False, True])
def test_children_end_with_killed_supervisor(tmp_path: Path, portable: bool) -> None:
    program = SUPERVISED.replace("PORTABLE", str(portable))
    command = [sys.executable, "-c", SUPERVISING, str(tmp_path), program]
    deadline = time.monotonic() + 60
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        try:
            while any("runs" not in (tmp_path / name).read_text() for name in ("one", "two")):
                assert time.monotonic() < deadline and parent.poll() is None
                time.sleep(0.05)
        finally:
            parent.kill()
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "they are still there"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie has ended, though the first process of a container may not reap it."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(found.strip()) and not found.startswith("Z")


def test_port_in_use_is_reported_before_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    monkeypatch.setattr(supervisor, "build_processes", lambda *_, **__: pytest.fail("processes are made"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(
                cluster._run_cluster(parser.parse_args(["up", "--port", str(port), "m"]), {"both": 1}, tmp_path)
            )


class LateProcess:
    """It ends in the moment before it is killed."""

    returncode, waits = None, 0

    def terminate(self) -> None: ...

    def kill(self) -> None:
        raise ProcessLookupError

    async def wait(self) -> int:
        self.waits += 1
        if self.waits == 1:
            await asyncio.Event().wait()
        return 0


def test_process_ending_during_kill_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.01)
    said: list[str] = []
    them = Supervisor(lambda who, what: said.append(what))
    one = child("one", tmp_path / "log")
    one.process = cast("Any", LateProcess())
    asyncio.run(them._stop_process(one))
    assert said == ["stopped"]


def test_supervision_survives_closed_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "hung up")

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Gone())
        cluster._print_event("one", "started")


def test_closed_terminal_stops_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parser, one = argparse.ArgumentParser(), child("one", tmp_path / "log", *SLEEPS)
    cluster.add_arguments(parser)
    monkeypatch.setattr(supervisor, "build_processes", lambda *_, **__: [one])

    async def main() -> None:
        up = asyncio.create_task(
            cluster._run_cluster(parser.parse_args(["up", "--port", "0", "m"]), {"both": 1}, tmp_path)
        )
        await until(lambda: one.process is not None)
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(20):
            await up

    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert one.process is not None and one.process.returncode is not None


def test_exit_is_described_for_any_signal() -> None:
    told = [supervisor._describe_exit(status) for status in (0, 3, -signal.SIGKILL, -(signal.SIGRTMIN + 1))]
    assert told[:3] == ["ended with status 0", "ended with status 3", "ended by SIGKILL"] and "signal 3" in told[3]
