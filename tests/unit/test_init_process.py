"""A command that is process 1 of a container ends at SIGTERM also before it serves."""

from __future__ import annotations

import signal
import subprocess
import sys

STARTING_COMMAND = """
import os, time
os.getpid = lambda: PID
import emberline.cli.__main__ as entry_point

def load(*arguments):
    print("loading", flush=True)
    time.sleep(30)

entry_point._run_command = load
entry_point.main(["router"])
"""


def stop_while_loading(pid: str) -> int:
    command = [sys.executable, "-c", STARTING_COMMAND.replace("PID", pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        return process.wait(10)


def test_process_1_handles_sigterm_while_it_loads() -> None:
    assert stop_while_loading("1") == 128 + signal.SIGTERM


def test_other_processes_leave_sigterm_to_the_kernel() -> None:
    assert stop_while_loading("4711") == -signal.SIGTERM
