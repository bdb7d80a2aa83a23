"""question_process: a child process that answers questions over a pipe until it receives "stop"."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SendCommand = Callable[[str], Any]


@contextmanager
def running_command_process(serve_commands: Callable[..., None], *arguments: Any) -> Iterator[SendCommand]:
    """Run `serve(pipe, *arguments)` in a child process; yield a function that returns its answer to a question."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve_commands, args=(theirs, *arguments))
    child.start()

    def ask(what: str) -> Any:
        ours.send(what)
        return ours.recv()

    try:
        yield ask
    finally:
        ours.send("stop")
        child.join()
