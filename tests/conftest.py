"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from failed_tests import write_failed_tests
from postgres_server import Postgres, find_tools, start_postgres, stop_postgres
from servers import Server, start_server, stop_server

from emberline.core import freeport

TESTS = Path(__file__).parent
WIRE_SHARE = 0.9  # of the run, in which all files of tests/wire are started
# Files with tests of the server with the real default model (`running`). It takes 5 s of CPU time to start.
SERVER_FILES = (
    "tests/e2e/test_dashboards.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_fuzz.py",
    "tests/e2e/test_gateway_engine.py",
    "tests/e2e/test_gateway_semantic_minilm.py",
    "tests/e2e/test_playground.py",
    "tests/wire/test_anthropic_client.py",
    "tests/wire/test_openai_client.py",
)

if TYPE_CHECKING:
    from local_gateway import LocalGateway

    from emberline.bench.mooncake_master import MooncakeMaster


COMPILE_TIMEOUT_S = 20.0


def handle_signals() -> None:
    """Handle Ctrl-C and hang-ups, which a shell's background jobs and nohup ignore, as would processes of tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: meanwhile it takes a tenth of the time, and frees nothing
    handle_signals()
    # Each process that runs tests takes ports of its own: a port is free until the server that it is for has started.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = len(freeport.PORT_RANGE) // count
    freeport._next_index = number * share + random.SystemRandom().randrange(share // 2)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Wait in a new checkout until another process has compiled the first half of all tests, and what they import.

    If all processes began at once, each would compile every file by itself. The half is compiled when the files of
    tests/unit begin."""
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if is_first or session.config.option.file_or_dir or sys.dont_write_bytecode:
        return
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    while not (TESTS / "unit" / "__pycache__").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if (path := os.environ.get("EMBERLINE_FAILED_TESTS")) and "PYTEST_XDIST_WORKER" not in os.environ:
        write_failed_tests(terminalreporter, Path(path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run all files whose tests share a server, and each other file run in any one of them."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedServerScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SERVER_FILES[0] if file in SERVER_FILES else file

    return SharedServerScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        deselect_gpu_tests(config, items)
    spread_wire_tests(items)


def deselect_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, leave out the tests that need one: it takes 12 s to skip 4,000 tests one by one."""
    skipped = [
        item
        for item in items
        if "gpu" in item.path.parts and any(True in mark.args for mark in item.iter_markers("skipif"))
    ]
    config.hook.pytest_deselected(items=skipped)
    left_out = set(skipped)
    items[:] = [item for item in items if item not in left_out]


def spread_wire_tests(items: list[pytest.Item]) -> None:
    """Spread the files of tests/wire evenly among all others, but the last, which are short.

    They mostly wait, while other files need a whole core: one worker should run the former beside the latter. At the
    end, a long file in one worker would leave the others without work."""
    files: dict[bool, dict[Path, list[pytest.Item]]] = {True: {}, False: {}}
    for item in items:
        files["wire" in item.path.parts].setdefault(item.path, []).append(item)
    places = [
        (i / len(group) * (WIRE_SHARE if is_wire else 1.0), tests)
        for is_wire, group in files.items()
        for i, tests in enumerate(group.values())
    ]
    items[:] = [item for _, tests in sorted(places, key=lambda place: place[0]) for item in tests]


def pytest_collection_finish() -> None:
    """Exclude the 700,000 objects of imported modules and collected tests from garbage collection.

    Scanning them takes 8 % of the CPU time of unit tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def single_threads() -> Iterator[None]:
    """Let native kernels compute with one thread in each of several pytest processes, unless a test sets more.

    A second thread spins between the small ops of tests, and takes a fifth of the time of another process's core."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in ("emberline.kernels.backend", "emberline.engine.boot"):
            patch.setattr(f"{module}.core_count", lambda: 1)
        yield


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real server with the real default model, one for the whole run if SERVER_FILES has the files of all users."""
    started = start_server(tmp_path_factory.mktemp("server") / "log")
    yield started
    stop_server(started)


@pytest.fixture
def server(running: Server) -> str:
    return running.url


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of our own, one for the whole run; a test makes its own database in it."""
    tools = find_tools()
    if tools is None:
        pytest.skip("PostgreSQL is not installed")
    started = start_postgres(tools)
    yield started
    stop_postgres(started)


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of each kind; `tmp_path/store` is the directory of SQLite's."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/store"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def gateway(gateways: LocalGateway) -> LocalGateway:
    """A file's own (`gateways`), its fakes as if nothing had been asked of them."""
    gateways.reset()
    return gateways


@pytest.fixture(scope="module")
def short_timeouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    """The gateway that the test file's `start_gateways` starts, with timeouts of about a second."""
    from local_gateway import HASTY

    with request.module.start_gateways(tmp_path_factory.mktemp("hasty"), HASTY) as started:
        yield started


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeMaster]:
    """A running master of a Mooncake store; its clients close at once."""
    from emberline.bench.mooncake_master import MooncakeMaster
    from emberline.kv.tiers import storeclient

    monkeypatch.setattr(storeclient, "CLOSE_TIMEOUT_S", 0.01)  # closing takes two seconds
    started = MooncakeMaster().start()
    yield started
    started.kill()
