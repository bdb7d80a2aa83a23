"""A real redis-server of a test's own: a free port, nothing written, ended with the test."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from emberline.core.freeport import free_port


@dataclass(slots=True)
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def start_redis(port: int = 0) -> RedisServer:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (scripts/setup test does it)")
    port = port or free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no"]
    server = RedisServer(subprocess.Popen([program, *options], stdout=subprocess.DEVNULL), port)
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server
        except OSError:
            assert time.monotonic() < deadline and server.process.poll() is None, "redis-server did not start"
            time.sleep(0.02)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    server = start_redis()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
