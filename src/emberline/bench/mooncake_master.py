"""MooncakeMaster: runs a `mooncake_master` process (the coordinator of Mooncake's Store) for benchmarks and tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.freeport import free_port


def freeze_process(pid: int) -> None:
    """Stop the process with SIGSTOP and return when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while any(task.read_text().rsplit(")")[-1].split()[0] != "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} did not stop in 10 s after SIGSTOP")
        time.sleep(0.005)


@dataclass
class MooncakeMaster:
    """A master at a fixed address that can be started, frozen, killed and restarted."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> MooncakeMaster:
        program = Path(sys.executable).with_name("mooncake_master")
        if not program.exists():
            raise FileNotFoundError(f"mooncake_master is not installed: {program} does not exist")
        ports = (f"--rpc_port={self.port}", f"--metrics_port={free_port()}")
        hosts = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1")
        command = [str(program), *ports, *hosts, "--logtostderr", "--minloglevel=3"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.02)
        raise TimeoutError(f"mooncake_master does not listen at port {self.port} after 20 s")

    def freeze(self) -> None:
        assert self.process is not None
        freeze_process(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
