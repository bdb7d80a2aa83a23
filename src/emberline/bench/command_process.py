"""running_command_process: a child process that executes commands from a pipe until it receives "stop"."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SendCommand = Callable[[str], Any]


@contextmanager
def running_command_process(serve_commands: Callable[..., None], *arguments: Any) -> Iterator[SendCommand]:
    """Run `serve_commands(pipe, *arguments)` in a child process while the context is open.

    Yield a function that sends a command to the child process and returns the answer.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve_commands, args=(theirs, *arguments))
    child.start()

    def send_command(command: str) -> Any:
        ours.send(command)
        return ours.recv()

    try:
        yield send_command
    finally:
        ours.send("stop")
        child.join()
