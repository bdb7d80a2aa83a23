"""Our Redis client compared with redis-py's asyncio client: CPU per command, start, memory, and a Redis that hangs.

pip install redis==8.1.0 hiredis==3.5.0
python -m emberline.bench.library_redis --json benchmarks/results/library-redis.json

A command is the gateway's script that reserves amounts of two limits, called by its hash (EVALSHA).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from emberline.bench import report as reports
from emberline.bench.report import BenchReport
from emberline.core.freeport import free_port

LIBRARIES = ("ours", "redis-py")
CONCURRENT_COMMANDS = 20
COMMAND_TIMEOUT_S = 5.0  # while Redis answers, so that a busy machine causes no errors
HUNG_TIMEOUT_S = 0.05  # while Redis hangs
HUNG_COMMANDS = 100
KEYS = [f"bench:{{acme/main}}:{name}:{part}" for name in ("requests", "tokens") for part in ("used", "held")]
WINDOW = [60_000, 1, 0]  # slot length in ms, number of slots, offset
MAX_START_S = 10.0

RunScript = Callable[[list[str | int]], Awaitable[Any]]


def make_script_arguments(number: int) -> list[str | int]:
    return [f"reservation-{number}", 1, 2**40, 1, *WINDOW, 2**40, 1000, *WINDOW]


async def connect_our_client(url: str, script_text: str, timeout_s: float) -> RunScript:
    from emberline.core.clock import SystemClock
    from emberline.gateway.redis_client import RedisClient, RedisScript

    client, script = RedisClient(url, SystemClock(), timeout_s=timeout_s), RedisScript(script_text)
    assert await client.start()
    return lambda arguments: client.run_script(script, KEYS, arguments)


async def connect_redis_py_client(url: str, script_text: str, timeout_s: float) -> RunScript:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    client = Redis.from_url(url, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0), max_connections=64)
    sha = await client.script_load(script_text)
    return lambda arguments: client.evalsha(sha, len(KEYS), *KEYS, *arguments)


async def measure(library: str, url: str, num_commands: int) -> dict[str, float]:
    """Measure one Redis client: connecting, `num_commands` commands, memory, and a Redis that hangs.

    CPU seconds are returned for connecting and for the commands. Then the parent process stops Redis with SIGSTOP, and
    `hung_s` is the wall time of further commands, all of which time out.
    """
    from importlib import resources

    folder = resources.files("emberline.gateway.limits")
    text = (folder / "window.lua").read_text() + (folder / "reserve.lua").read_text()
    started = time.process_time()
    connect = connect_our_client if library == "ours" else connect_redis_py_client
    run_script = await connect(url, text, COMMAND_TIMEOUT_S)
    start_s = time.process_time() - started
    for number in range(200):
        await run_script(make_script_arguments(number))
    numbers = iter(range(1000, 1000 + num_commands))

    async def send_commands() -> None:
        for number in numbers:
            await run_script(make_script_arguments(number))

    started = time.process_time()
    await asyncio.gather(*(send_commands() for _ in range(CONCURRENT_COMMANDS)))
    cpu_s = time.process_time() - started
    run_script = await connect(url, text, HUNG_TIMEOUT_S)
    with suppress(Exception):  # the first command opens the connection
        await run_script(make_script_arguments(0))
    print("hang", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    began = time.perf_counter()
    for number in range(HUNG_COMMANDS):
        with suppress(Exception):  # each library has its own errors for a timeout
            await run_script(make_script_arguments(number))
    hung_s = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"start_s": start_s, "cpu_s": cpu_s, "hung_s": hung_s, "memory_mb": memory}


def run_child(library: str, url: str, num_commands: int, server: subprocess.Popen[bytes]) -> dict[str, float]:
    arguments = [sys.executable, "-m", "emberline.bench.library_redis", "--child", library, url, str(num_commands)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "hang\n"
        server.send_signal(signal.SIGSTOP)
        try:
            child.stdin.write("go\n")
            child.stdin.flush()
            found: dict[str, float] = json.loads(child.stdout.readline())
        finally:
            server.send_signal(signal.SIGCONT)
    return found


def start_redis() -> tuple[subprocess.Popen[bytes], int]:
    program, port = shutil.which("redis-server"), free_port()
    if program is None:
        sys.exit("redis-server is not installed (hint: apt install redis-server)")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + MAX_START_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server, port
        time.sleep(0.05)
    sys.exit("redis-server did not start")


def run(rounds: int, num_commands: int) -> BenchReport:
    server, port = start_redis()
    measured: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
    try:
        for _ in range(rounds):
            for library in LIBRARIES:
                measured[library].append(run_child(library, f"redis://127.0.0.1:{port}", num_commands, server))
    finally:
        server.kill()
        server.wait()
    config = {
        "rounds": rounds,
        "commands": num_commands,
        "concurrent": CONCURRENT_COMMANDS,
        "hung_timeout_s": HUNG_TIMEOUT_S,
        "hung_commands": HUNG_COMMANDS,
        "clock": "CPU time of the client process; wall time for the Redis that hangs",
        "versions": {name: version(name) for name in ("redis", "hiredis")},
    }
    report = BenchReport("library-redis", config)

    def add(name: str, unit: str, figure: str, scale: float = 1.0) -> None:
        values = {library: [each[figure] * scale for each in measured[library]] for library in LIBRARIES}
        report.add(name, values["ours"], unit, peer=median(values["redis-py"]))

    add("command", "us", "cpu_s", 1e6 / num_commands)
    add("start", "ms", "start_s", 1e3)
    add("memory", "MB", "memory_mb")
    add("hung_redis", "s", "hung_s")
    return report


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        library, url, commands = sys.argv[2:5]
        print(json.dumps(uvloop.run(measure(library, url, int(commands)))), flush=True)
        return
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", type=int, default=10_000, help="commands in each round")
    reports.add_report_arguments(parser)
    options = parser.parse_args()
    run(options.rounds, options.commands).print_and_save(options.json, options.commit)


if __name__ == "__main__":
    main()
