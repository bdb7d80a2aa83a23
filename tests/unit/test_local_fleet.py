"""LocalFleet: workers as processes of this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from emberline.autoscaler import local_fleet
from emberline.autoscaler.fleet import FleetError, FleetWorker
from emberline.autoscaler.local_fleet import LocalFleet
from emberline.core.errors import InvalidRequest

# A process that ends at SIGTERM, like a worker; with "stubborn" in its command line, it does not.
WORKER = """
import os, signal, sys, time
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.getpid()
if os.fork() == 0:  # a forked child has the same command line
    while os.getppid() == pid: time.sleep(0.05)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def router_url() -> str:
    return f"http://localhost:8000/{os.getpid()}/{time.monotonic_ns()}"


def make_fleet(router_url: str, home: Path, *more: str, other_routers: Sequence[str] = ()) -> LocalFleet:
    def build_command(role: str, name: str) -> list[str]:
        return [sys.executable, "-c", WORKER, router_url, name, *more]

    urls = [router_url, *other_routers]
    return LocalFleet(build_command, ["both", "decode"], router_urls=urls, log_dir=home, environment={})


async def wait_for_count(fleet: LocalFleet, count: int) -> list[FleetWorker]:
    async with asyncio.timeout(10):
        while len(workers := await fleet.list_workers()) != count:
            await asyncio.sleep(0.02)
    return workers


def test_local_workers_are_started_listed_and_stopped(router_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        fleet = make_fleet(router_url, tmp_path)
        try:
            await fleet.start_workers("both", 2)
            await fleet.start_workers("decode", 1)
            workers = await wait_for_count(fleet, 3)
            assert sorted(worker.role for worker in workers) == ["both", "both", "decode"]
            first = next(worker for worker in workers if worker.role == "decode")
            await fleet.stop_worker(first.name)
            assert first.name not in {worker.name for worker in await wait_for_count(fleet, 2)}
        finally:
            await fleet.close(stop_workers=True)
        assert not await make_and_list(router_url, tmp_path)

    asyncio.run(run())


async def make_and_list(router_url: str, home: Path) -> list[FleetWorker]:
    fleet = make_fleet(router_url, home)
    try:
        return await fleet.list_workers()
    finally:
        await fleet.close(stop_workers=False)


def test_a_new_fleet_adopts_the_workers_of_a_killed_one(router_url: str, tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, time; from pathlib import Path; sys.path += [sys.argv[3], sys.argv[4]]\n"
        "from test_local_fleet import make_fleet\n"
        "fleet = make_fleet(sys.argv[1], Path(sys.argv[2])); asyncio.run(fleet.start_workers('both', 2))\n"
        "print('started', flush=True); time.sleep(60)"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, router_url, str(tmp_path), str(here), str(here.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as autoscaler:
        assert autoscaler.stdout is not None and autoscaler.stdout.readline() == b"started\n"
        with pytest.raises(InvalidRequest, match="another autoscaler"):
            asyncio.run(make_and_list(router_url, tmp_path))
        autoscaler.kill()

    async def adopt() -> None:
        fleet = make_fleet(router_url, tmp_path)
        workers = await wait_for_count(fleet, 2)
        assert {worker.role for worker in workers} == {"both"}
        await fleet.close(stop_workers=True)
        assert not await make_and_list(router_url, tmp_path)

    asyncio.run(adopt())


def test_one_autoscaler_for_a_router_however_its_url_is_written(router_url: str, tmp_path: Path) -> None:
    second = router_url.replace("localhost", "router-b")
    same = [router_url.replace("localhost", host) + "/" for host in ("127.0.0.1", "LOCALHOST", "[::1]", "0.0.0.0")]
    groups = [(url, []) for url in (router_url, *same)] + [(second, same[:1]), (second, [])]

    async def run() -> None:
        fleet = make_fleet(same[0].replace("http", "HTTP"), tmp_path, other_routers=[second])
        await fleet.start_workers("both", 1)
        await wait_for_count(fleet, 1)
        for url, others in groups:
            with pytest.raises(InvalidRequest, match="another autoscaler"):
                make_fleet(url, tmp_path, other_routers=others)
        other_port = router_url.replace(":8000", ":8001")
        await make_fleet(other_port, tmp_path).close(stop_workers=False)
        await fleet.close(stop_workers=False)
        heir = make_fleet(router_url, tmp_path)  # finds the worker that was started with the other spelling
        await wait_for_count(heir, 1)  # a moment after its start, the worker has no command line yet
        await heir.close(stop_workers=True)

    asyncio.run(run())


def test_a_worker_that_does_not_end_is_killed(router_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.autoscaler.local_fleet.STOP_TIMEOUT_S", 0.2)

    async def run() -> None:
        fleet = make_fleet(router_url, tmp_path, "stubborn")
        await fleet.start_workers("both", 1)
        await asyncio.sleep(0.3)  # until it ignores SIGTERM
        async with asyncio.timeout(10):
            await fleet.close(stop_workers=True)
        assert not await make_and_list(router_url, tmp_path)

    asyncio.run(run())


def test_a_worker_that_is_stopped_by_a_signal_is_killed(
    router_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberline.autoscaler.local_fleet.STOP_TIMEOUT_S", 0.05)

    async def run() -> None:
        fleet = make_fleet(router_url, tmp_path)
        await fleet.start_workers("both", 1)
        ((child, process),) = fleet._children
        try:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # from now on, SIGTERM waits until it continues
            assert not await fleet.replace_worker(process.name)
            await wait_for_count(fleet, 0)
            assert child.wait(10) == -signal.SIGKILL
        finally:
            child.kill()
            await fleet.close(stop_workers=False)

    asyncio.run(run())


def test_a_worker_that_ends_just_before_its_signal_is_no_error(
    router_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_nothing(descriptor: int, number: int) -> None:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    async def run() -> None:
        fleet = make_fleet(router_url, tmp_path)
        await fleet.start_workers("both", 1)
        (worker,) = await wait_for_count(fleet, 1)
        ((child, _),) = fleet._children
        fleet._children.clear()  # as if an earlier autoscaler had started the worker
        await wait_for_count(fleet, 1)  # a moment after its start, it has no command line yet
        with monkeypatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", send_nothing)
            await fleet.stop_worker(worker.name)
            patch.setattr(local_fleet, "STOP_TIMEOUT_S", 0.0)
            patch.setattr(local_fleet, "KILL_TIMEOUT_S", 0.1)
            with pytest.raises(FleetError, match=f"do not end within 0.1 s after SIGKILL: {worker.name}"):
                await fleet._wait_until_ended()
        fleet._kill_at[worker.name] = 0.0
        await fleet.close(stop_workers=True)
        child.wait(10)

    asyncio.run(run())


@pytest.mark.parametrize("is_in_proc", [True, False])  # its command line is not there yet just after its start
def test_a_gpu_is_given_to_one_worker_only(
    router_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_proc: bool
) -> None:
    async def run() -> None:
        def build_command(role: str, name: str) -> list[str]:
            return [sys.executable, "-c", WORKER, router_url, name]

        fleet = LocalFleet(
            build_command, ["both"], router_urls=[router_url], log_dir=tmp_path, environment={}, gpus=["0", "1", "2"],
            gpus_by_role={"both": 2},
        )  # fmt: skip
        try:
            await fleet.start_workers("both", 1)
            with monkeypatch.context() as patch:
                if not is_in_proc:
                    patch.setattr(fleet, "_scan_processes", lambda: iter(()))
                assert len(await fleet.list_workers()) == 1
                with pytest.raises(FleetError, match="needs 2 GPUs, and 1 of 3 are free"):
                    await fleet.start_workers("both", 1)
        finally:
            await fleet.close(stop_workers=True)

    asyncio.run(run())
